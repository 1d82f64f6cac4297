# SPDX-License-Identifier: Apache-2.0
"""The master's orders to its agents: `orders.txt`, beside the journal and made from it.

What the master decides stands in `master.jsonl`, and there first. An agent reads none of that: it
would be every group of every round. Here it reads short lines, which are for all agents, and its
own row of a round. Nothing that decides or reports reads this file.

Each line is JSON, and short however many nodes there are: a record of the master's without what
differs between nodes. After a line with `rows` come that many, of `width` bytes each, in the order
of the nodes' names. The rows of the first line are the names themselves, so that an agent knows its
number; those of a round are `group address port`, empty for who takes no part.

The doorbell says that there is something new to read. Its channel is there already: the standard
streams of the step, which srun forwards. The master that has written sends a line to all. An agent
that has written prints its node's name, and after it what it wrote, so that the master need not
open a file for every node. The file is the truth, and is written first. Nothing waits for a ring:
one that is lost, torn or late costs time, because both sides also look by themselves, seldom.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from slurm_health.records import records
from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.text import LineBuffer
from slurm_health.system import journal, private_files

NAME = "orders.txt"
# A line is read with what follows it, up to this: seldom more than one read.
_AHEAD_BYTES = 2048
_RING = b"slurm-health: news of "
_NEWS = re.compile(_RING + rb"(\S+)(?: (\d{1,18})(\+?) (.*))?")
_ALL = b"slurm-health: news\n"
_MOST_BYTES = 65536  # of what is read at once, and kept of a line that does not end
# Slurm forwards lines of up to 1,024 bytes whole (io_hdr.h), and tears longer ones.
_PIECE_BYTES = 640  # and the name of a node, of up to 255
_MOST_RUNG_BYTES = 32768  # what was written beyond this stays in the file; a pipe holds twice that
_Numbers = list[tuple[int, int]]  # nodes by their numbers, as ranges: first and last


class _Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `to` are the nodes that it is for, all where none are named."""

    record: (
        records.RoundStarted
        | records.GroupAborted
        | records.AgentsLaunched
        | records.MasterWaits
        | records.VerdictReached
    )
    to: _Numbers = []
    width: int = 0
    rows: int = 0
    run_id: str = ""  # of the first line
    secret: str = ""  # so, which names the meetings of groups and stands nowhere else


_encoder = msgspec.json.Encoder()
_decoder = JsonDecoder[_Order](_Order)
_STAY = records.MasterWaits(reason="")


class OrderWriter:
    """Appends to the orders of one run, of which there is one master."""

    def __init__(self, directory: Path, run_id: str, nodes: Sequence[str]) -> None:
        """Begin the orders.

        Raises:
            JournalError: the file cannot be written.
        """
        self.path = directory / NAME
        names = sorted(nodes)
        self._numbers = {name: number for number, name in enumerate(names)}
        try:
            with (
                journal.opened(directory, os.geteuid(), make=True) as run,
                private_files.opened(run, NAME, os.O_RDWR, make=True) as file,
            ):
                os.ftruncate(file, 0)
        except OSError as err:
            raise journal.unusable(self.path, "written", err) from err
        first = _Order(record=_STAY, run_id=run_id, secret=os.urandom(16).hex())
        self._write(_with_rows(first, [name.encode() for name in names]))

    def append(self, *new: records.Record) -> bool:
        """Write what agents are to hear of records that stand in the journal; tell if that is any.

        Raises:
            JournalError: the file cannot be written.
        """
        lines: list[bytes] = []
        stopped: dict[tuple[int, bool], list[str]] = {}
        for record in new:
            match record:
                case records.RoundStarted(groups=groups, rendezvous=meetings):
                    rows = [b""] * len(self._numbers)
                    for group, at in zip(groups, meetings, strict=True):
                        for node in group if at.port else ():
                            row = f"{','.join(group)} {at.address} {at.port}"
                            rows[self._numbers[node]] = row.encode()
                    common = replace(record, groups=[], rendezvous=[], absent=[])
                    lines.append(_with_rows(_Order(record=common), rows))
                case records.GroupAborted(round=index, group=group, timed_out=timed_out):
                    stopped.setdefault((index, timed_out), []).extend(group)
                case records.AgentsLaunched(nodes=nodes):
                    order = _Order(record=replace(record, nodes=[]), to=self._ranges(nodes))
                    lines.append(_encoder.encode(order) + b"\n")
                case records.MasterWaits():
                    lines.append(_encoder.encode(_Order(record=_STAY)) + b"\n")
                case records.VerdictReached() | records.JobOutcome():
                    over = _Order(record=records.VerdictReached(nodes=[]))
                    lines.append(_encoder.encode(over) + b"\n")
                case _:
                    pass
        for (index, timed_out), nodes in stopped.items():
            # Whose failure it was, if one's, stands in the master's file.
            reason = "the deadline of the round has passed" if timed_out else "a member failed"
            stop = records.GroupAborted(round=index, group=[], reason=reason, timed_out=timed_out)
            order = _Order(record=stop, to=self._ranges(nodes))
            lines.append(_encoder.encode(order) + b"\n")
        if lines:
            self._write(b"".join(lines))
        return bool(lines)

    def _ranges(self, nodes: Iterable[str]) -> _Numbers:
        ranges: _Numbers = []
        for number in sorted(self._numbers[node] for node in nodes):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return ranges

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


def _with_rows(order: _Order, rows: Sequence[bytes]) -> bytes:
    """Return an order with a row for each node, all of the same width."""
    width = max(map(len, rows)) + 1
    line = _encoder.encode(replace(order, width=width, rows=len(rows))) + b"\n"
    return line + b"".join(row.ljust(width - 1) + b"\n" for row in rows)


class _Rows(NamedTuple):
    """The rows behind a line, of an open file."""

    file: int
    begin: int
    width: int

    def row(self, number: int) -> bytes:
        """Return a row without what fills it."""
        return os.pread(self.file, self.width, self.begin + number * self.width).rstrip(b" \n")


class OrderReader:
    """Reads what concerns one node, as records in which nothing else is.

    Whatever else the master says is read as that it is there.
    """

    def __init__(self, directory: Path, node: str) -> None:
        self.path = directory / NAME
        self.run_id = ""
        self.secret = ""
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
                return self._read(file)
        except FileNotFoundError:
            return []
        except OSError as err:
            if err.errno == errno.ESTALE:  # replaced on the server since; the next open sees it
                return []
            raise journal.unusable(self.path, "read", err) from err

    def _read(self, file: int) -> list[records.Record]:
        """Return what stands whole behind the last order.

        A network filesystem shows the length of a file before what was written.
        """
        news: list[records.Record] = []
        size = os.fstat(file).st_size
        lines = io.BufferedReader(io.FileIO(file, closefd=False), _AHEAD_BYTES)
        while self._offset < size:
            lines.seek(self._offset)
            line = lines.readline()
            begin = self._offset + len(line)
            try:
                order = _decoder.decode(line)
                end = begin + order.rows * order.width
                if not line.endswith(b"\n") or end > size:
                    break  # it is being written
                rows = _Rows(file, begin, order.width)
                if order.run_id:
                    name = self._node.encode()
                    self._number = bisect.bisect_left(range(order.rows), name, key=rows.row)
                    if rows.row(self._number) != name:
                        break  # this node is none of that run's
                    self.run_id, self.secret = order.run_id, order.secret
                row = rows.row(self._number).decode() if order.rows else ""
                news.append(self._own(order, row.split()))
            except ValueError:
                break
            self._offset = end
        return news

    def _own(self, order: _Order, row: Sequence[str]) -> records.Record:
        """Return an order as a record of this node's."""
        if order.to and not any(first <= self._number <= last for first, last in order.to):
            return _STAY
        match order.record:
            case records.RoundStarted() if not row:
                return _STAY
            case records.RoundStarted():
                group, address, port = row
                self._group = group.split(",")
                meeting = records.Rendezvous(address=address, port=int(port))
                return replace(order.record, groups=[self._group], rendezvous=[meeting])
            case records.GroupAborted():
                return replace(order.record, group=self._group)
            case records.AgentsLaunched():
                return replace(order.record, nodes=[self._node])
            case other:
                return other


class News(NamedTuple):
    """Bytes of a node's file, from `begins` on; without any, the file is to be read."""

    node: str
    begins: int = 0
    data: bytes = b""


class Bell:
    """An agent's end of it: standard input and output, where they are pipes or sockets."""

    def __init__(self, node: str, inward: int = 0, outward: int = 1) -> None:
        self._name = node
        self._inward = inward if _carries(inward) else None
        self._outward = outward if _carries(outward) else None

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when the master rings; None when it can do so no more."""
        return self._inward

    def ring(self, begins: int, lines: bytes) -> None:
        """Tell the master what this node has written to its file, and where that begins there.

        Nothing is waited for.
        """
        if self._outward is not None:
            with contextlib.suppress(OSError):  # full of unread rings, or closed
                for ring in rings(self._name, begins, lines):
                    os.write(self._outward, ring)

    def rang(self) -> bool:
        """Return whether the master has rung since the last call."""
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


def rings(node: str, begins: int, lines: bytes) -> Iterator[bytes]:
    """Yield the lines of a ring: what a node has written, or only that it has."""
    ring = _RING + node.encode()
    if len(lines) > _MOST_RUNG_BYTES:
        yield ring + b"\n"
        return
    for line in lines.split(b"\n")[:-1]:
        for at in range(0, len(line) + 1, _PIECE_BYTES):
            more = b"+" if at + _PIECE_BYTES <= len(line) else b""
            yield b"%s %d%s %s\n" % (ring, begins + at, more, line[at : at + _PIECE_BYTES])
        begins += len(line) + 1


class Ringers:
    """The master's reading of one stream: whose rings have arrived, and with what."""

    def __init__(self) -> None:
        self._lines = LineBuffer(_MOST_BYTES)

    def rung(self, data: bytes) -> list[News]:
        """Return the news in whole lines of rings; other lines say nothing."""
        news = []
        for line in self._lines.feed(data):
            if match := _NEWS.fullmatch(line):
                node, begins, more, piece = match.groups()
                name = node.decode(errors="replace")
                data = b"" if begins is None else piece if more else piece + b"\n"
                news.append(News(name, int(begins or 0), data))
        return news


def ring_all(outward: int) -> None:
    """Tell all agents behind a pipe that there are orders; nothing is waited for."""
    with contextlib.suppress(OSError):  # full of unread rings, or closed
        os.write(outward, _ALL)


def _carries(descriptor: int) -> bool:
    """Return whether it can carry rings; from then on reads and writes there do not block."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
            return False
        os.set_blocking(descriptor, False)
    except OSError:
        return False
    return True
