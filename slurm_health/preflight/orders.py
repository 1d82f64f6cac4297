# SPDX-License-Identifier: Apache-2.0
"""The master's orders to its agents: `orders.jsonl`, beside the journal and made from it.

What the master decides stands in `master.jsonl`, and there first. An agent reads none of that: it
would be every group of every round. Here it reads short lines and, by its number, its own part of a
round (`preflight.order_lines` has the format). Nothing that decides or reports reads this file.

The doorbell says that there is something new to read, and no more. Its channel is there already:
the standard streams of the step, which srun forwards. An agent that has written prints a line with
its node's name; the master that has written sends a line to all. Nothing waits for it: a ring that
is lost, torn or late costs time, because each side also looks by itself now and then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight import order_lines as orders
from slurm_health.records import records
from slurm_health.records.text import LineBuffer
from slurm_health.records.verdict import NodeVerdict
from slurm_health.system import journal, private_files

ORDERS = "orders"
NAME = f"{ORDERS}.jsonl"
# A line is read with what follows it, up to this: seldom more than one read.
_AHEAD_BYTES = 2048
_RING = b"slurm-health: news of "
_ALL = b"slurm-health: news\n"
_MOST_BYTES = 65536  # of what is read at once, and kept of a line that does not end


class OrderWriter:
    """Appends to the orders of one run, of which there is one master at a time."""

    def __init__(self, directory: Path, run_id: str, nodes: Sequence[str]) -> None:
        """Begin the orders, or go on with those of a master that died.

        Raises:
            JournalError: the file cannot be written.
        """
        self.path = directory / NAME
        self._numbers = orders.numbers_of(nodes)
        try:
            with (
                journal.opened(directory, os.geteuid(), make=True) as run,
                private_files.opened(run, NAME, os.O_RDWR, make=True) as file,
            ):
                blocks = _Blocks(file)
                for _ in blocks:
                    pass
                os.ftruncate(file, blocks.offset)  # what the other one did not write whole
        except OSError as err:
            raise journal.unusable(self.path, "written", err) from err
        if not blocks.offset:
            self._write(orders.beginning(run_id, nodes))

    def conclude(
        self, verdict: records.VerdictReached, nodes: Collection[str], reason: str
    ) -> None:
        """Write who trains, for the processes of `slurm-health run`.

        Raises:
            JournalError: the file cannot be written.
        """
        self._write(orders.training(verdict, nodes, reason, self._numbers))

    def append(self, *new: records.Record) -> bool:
        """Write what agents are to hear of records that stand in the journal; tell if that is any.

        Raises:
            JournalError: the file cannot be written.
        """
        blocks = orders.blocks(new, self._numbers)
        if blocks:
            self._write(blocks)
        return bool(blocks)

    def _write(self, data: bytes) -> None:
        try:
            with (
                journal.opened(self.path.parent, os.geteuid()) as run,
                private_files.opened(run, NAME, os.O_WRONLY | os.O_APPEND) as file,
            ):
                # Not synced: it can be made again, and other nodes see it once it is closed.
                while data:
                    data = data[os.write(file, data) :]
        except OSError as err:
            raise journal.unusable(self.path, "written", err) from err


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains, by their numbers, and why; the verdict on this node where it does not."""

    nodes: orders.Numbers
    reason: str
    verdict: NodeVerdict | None


class OrderReader:
    """Reads what concerns one node, as records in which nothing else is.

    Whatever else the master says is read as that it is there. `training` is None until it is
    decided, which only `slurm-health run` does.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self.path = directory / NAME
        self.run_id = ""
        self.training: Training | None = None
        self._node = node
        self._number = 0
        self._offset = 0
        self._group: list[str] = []

    def read_new(self) -> list[records.Record]:
        """Return what has been ordered since the last call; nothing if there is no file.

        Raises:
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        try:
            with (
                journal.opened(self.path.parent, os.geteuid()) as run,
                private_files.opened(run, NAME) as file,
            ):
                return self._read(_Blocks(file, self._offset))
        except FileNotFoundError:
            return []
        except OSError as err:
            if err.errno == errno.ESTALE:  # replaced on the server since; the next open sees it
                return []
            raise journal.unusable(self.path, "read", err) from err

    def _read(self, blocks: _Blocks) -> list[records.Record]:
        found: list[records.Record] = []
        for order in blocks:
            try:
                found.append(self._heard(blocks, order))
            except ValueError:
                break  # a network filesystem shows the length before what was written
        self._offset = blocks.offset
        return found

    def _heard(self, blocks: _Blocks, order: orders.AnyOrder) -> records.Record:
        match order:
            case orders.Begin(run_id=run_id, cells=cells):
                self._number = orders.number_in(cells, blocks.cell, self._node)
                self.run_id = run_id
            case orders.BeginRound():
                if part := blocks.part(self._number):
                    started = orders.round_of(order, part)
                    self._group = started.groups[0]
                    return started
            case orders.Stop(round=index, nodes=nodes, timed_out=timed_out):
                if orders.names(nodes, self._number):
                    return _stopped(index, self._group, timed_out=timed_out)
            case orders.Train(nodes=nodes, reason=reason):
                verdict = orders.verdict_in(blocks.part(self._number))
                self.training = Training(nodes=nodes, reason=reason, verdict=verdict)
            case orders.Launch(launch=launch, nodes=nodes, light=light):
                if orders.names(nodes, self._number):
                    return records.AgentsLaunched(launch=launch, nodes=[self._node], light=light)
            case orders.Leave():
                return records.VerdictReached(nodes=[])
            case _:
                pass
        return records.MasterWaits(reason="")


class _Blocks:
    """The whole blocks of an open file, from an offset on.

    `offset` is behind the last one whose successor was asked for: one that breaks off has it again.
    """

    def __init__(self, file: int, offset: int = 0) -> None:
        self.offset = offset
        self._file = file
        self._size = os.fstat(file).st_size
        self._order: orders.AnyOrder | None = None
        self._table = 0
        self._ahead, self._ahead_from = b"", 0

    def __iter__(self) -> Iterator[orders.AnyOrder]:
        while self.offset < self._size:
            line = self._line()
            try:
                order = orders.decode(line)
            except ValueError:
                return
            self._order, self._table = order, self.offset + len(line)
            end = self._table + order.follow_bytes
            if end > self._size:
                return  # it is being written
            yield order
            self.offset = end

    def cell(self, number: int) -> bytes:
        """Return a cell of the table of the block that was yielded last."""
        assert self._order is not None
        return self._read(self._table + number * self._order.width, self._order.width)

    def part(self, number: int) -> bytes:
        """Return a node's part in the text of that block, empty where it has none."""
        assert self._order is not None
        place = orders.place_in_text(self.cell(number))
        if place is None:
            return b""
        text = self._table + self._order.cells * self._order.width
        return self._read(text + place[0], place[1])

    def _line(self) -> bytes:
        """Return the line at `offset`, with its end if it has one."""
        length = _AHEAD_BYTES
        while True:
            line, newline, _ = self._read(self.offset, length).partition(b"\n")
            if newline or self.offset + length >= self._size:
                return line + newline
            length *= 2

    def _read(self, start: int, length: int) -> bytes:
        """Return these bytes, from what was read last if they are in it."""
        length = min(length, self._size - start)
        known = start - self._ahead_from
        if known < 0 or known + length > len(self._ahead):
            self._ahead = os.pread(self._file, length, start)
            self._ahead_from, known = start, 0
        return self._ahead[known : known + length]


def _stopped(index: int, group: list[str], *, timed_out: bool) -> records.GroupAborted:
    """Return the end of a group; whose failure it was, if one's, stands in the master's file."""
    reason = "the deadline of the round has passed" if timed_out else "a member failed"
    return records.GroupAborted(round=index, group=group, reason=reason, timed_out=timed_out)


class Bell:
    """An agent's end of it: standard input and output, where they are pipes or sockets."""

    def __init__(self, node: str, inward: int = 0, outward: int = 1) -> None:
        self._line = _RING + node.encode() + b"\n"
        self._inward = inward if _carries(inward) else None
        self._outward = outward if _carries(outward) else None

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the master rings; None when it can do so no more."""
        return self._inward

    def ring(self) -> None:
        """Tell the master that this node has written. Nothing is waited for."""
        if self._outward is not None:
            with contextlib.suppress(OSError):  # it is full, and rings, or nobody is there
                os.write(self._outward, self._line)

    def heard(self) -> bool:
        """Tell whether the master has rung since the last call."""
        if self._inward is None:
            return False
        rung = False
        try:
            while data := os.read(self._inward, _MOST_BYTES):
                rung = True
                if len(data) < _MOST_BYTES:
                    return rung
        except BlockingIOError:
            return rung
        except OSError:
            pass
        self._inward = None
        return rung


class Ringers:
    """The master's reading of one stream: whose rings have arrived."""

    def __init__(self) -> None:
        self._lines = LineBuffer(_MOST_BYTES)

    def rung(self, data: bytes) -> list[str]:
        """Return the nodes in whole lines of rings; other lines say nothing."""
        return [
            line.removeprefix(_RING).decode(errors="replace")
            for line in self._lines.feed(data)
            if line.startswith(_RING)
        ]


def ring_all(outward: int) -> None:
    """Tell all agents behind a pipe that there are orders; nothing is waited for."""
    with contextlib.suppress(OSError):  # full of rings that have not been heard, or nobody is there
        os.write(outward, _ALL)


def _carries(descriptor: int) -> bool:
    """Tell whether a bell can be heard there; from then on nothing there waits."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
            return False
        os.set_blocking(descriptor, False)
    except OSError:
        return False
    return True
