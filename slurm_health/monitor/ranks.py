# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job on this node: processes with a heartbeat, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_health import heartbeat
from slurm_health.core.diagnosis.collected import FlightRecord
from slurm_health.core.diagnosis.seen import Frame
from slurm_health.core.diagnosis.watched import RankLook, RankNow
from slurm_health.monitor.flight_dumps import operations

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_MARK = f"/memfd:{heartbeat.NAME} "  # how /proc shows it; the kernel adds "(deleted)"
_MOST_FRAMES = 40
_MOST_OPERATIONS = 16
_MOST_ANSWER_BYTES = 16 << 20
_POLL_S = 0.05
SCRIPT = "script"  # what runs in the batch script itself belongs to no step


@dataclass(kw_only=True)
class Rank:
    """One process with a heartbeat, and the children that it had when it was looked for."""

    pid: int
    program: str
    beat: int  # the number of its open file
    children: tuple[int, ...] = ()
    asked: int = field(default=0)


class Ranks:
    """Finds the ranks of one job on one node."""

    def __init__(
        self,
        job: str,
        node: str,
        own_step: str,
        monotonic: Callable[[], float] = time.monotonic,
        root: Path = Path("/proc"),
    ) -> None:
        self._job, self._node, self._own_step = job, node, own_step
        self._monotonic = monotonic
        self._root = root
        self._ranks: list[Rank] = []

    def find(self) -> None:
        """Look at all processes of this user's for heartbeats; takes some ms on a full node."""
        found: dict[tuple[int, int], Rank] = {}
        children: dict[int, list[int]] = {}
        for pid in sorted(self._processes()):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                children.setdefault(_parent(self._root / str(pid)), []).append(pid)
                program = self._program(pid)
                if program is None:
                    continue
                for number, file in self._beats(pid):
                    # A forked child has its parent's file too, and a later start.
                    found.setdefault(file, Rank(pid=pid, program=program, beat=number))
        known = {each.pid: each for each in self._ranks}
        self._ranks = [known.get(each.pid, each) for each in found.values()]
        for each in self._ranks:
            each.children = tuple(_below(each.pid, children))

    def now(self, not_before_s: float = 0.0) -> list[RankNow]:
        """Return the ranks as they are; those that have ended are no longer among them.

        No age is older than what began at `not_before_s`: before that we did not run ourselves.
        """
        seen = []
        for each in list(self._ranks):
            try:
                seen.append(self._rank_now(each, not_before_s))
            except (OSError, ValueError):
                self._ranks.remove(each)
        return seen

    def look(self, wait_s: float) -> list[RankLook]:
        """Ask all ranks where they are; return their answers in time, and the kernel's word."""
        for each in self._ranks:
            self._ask(each)
        until_s = self._monotonic() + wait_s
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._ranks) and self._monotonic() < until_s:
            for each in self._ranks:
                if each.pid not in answers and (answer := self._answer(each)) is not None:
                    answers[each.pid] = answer
            time.sleep(_POLL_S)
        looks = []
        for each in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                looks.append(self._rank_look(each, answers.get(each.pid)))
        return looks

    def _processes(self) -> Iterator[int]:
        """Yield those of this user."""
        own = os.geteuid()
        for entry in os.scandir(self._root):
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if entry.stat().st_uid == own:
                        yield int(entry.name)

    def _program(self, pid: int) -> str | None:
        """Return what a process belongs to: a step of this job on this node, else None."""
        data = (self._root / str(pid) / "environ").read_bytes()
        environ = dict(entry.partition(b"=")[::2] for entry in data.split(b"\0"))
        step = environ.get(b"SLURM_STEP_ID", environ.get(b"SLURM_STEPID", b"")).decode()
        ours = environ.get(b"SLURM_JOB_ID") == self._job.encode()
        here = environ.get(b"SLURMD_NODENAME", self._node.encode()) == self._node.encode()
        if not (ours and here) or (step and step == self._own_step):
            return None
        return step or SCRIPT

    def _beats(self, pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the heartbeats among a process's open files, and what makes each of them unique."""
        files = self._root / str(pid) / "fd"
        for entry in os.scandir(files):
            file = Path(entry.path)
            if str(file.readlink()).startswith(_MARK):
                status = file.stat()
                yield int(entry.name), (status.st_dev, status.st_ino)

    def _beat(self, rank: Rank) -> tuple[Any, ...]:
        """Read a heartbeat.

        Raises:
            OSError: the process has ended.
            ValueError: it is none, or is being written at every look.
        """
        path = self._root / str(rank.pid) / "fd" / str(rank.beat)
        layout = heartbeat.LAYOUT
        for _ in range(3):
            with path.open("rb", buffering=0) as file:
                data = file.read(layout.size)
            if len(data) == layout.size:
                beat = layout.unpack(data)
                if beat[0] == heartbeat.MAGIC and beat[1] == beat[-1]:
                    return beat
        raise ValueError("no heartbeat")

    def _rank_now(self, rank: Rank, not_before_s: float) -> RankNow:
        _, _, number, step, steps, first_s, last_s, longest_s, own_s, own_steps, *_ = self._beat(
            rank
        )
        state, cpu_s = _state_and_cpu(self._root / str(rank.pid))
        io_bytes = _io_bytes(self._root / str(rank.pid))
        if state in "ZX":
            raise ValueError("it has ended")
        for child in rank.children:
            with contextlib.suppress(OSError, ValueError):
                cpu_s += _state_and_cpu(self._root / str(child))[1]
                io_bytes += _io_bytes(self._root / str(child))
        timed = max(1, steps - heartbeat.WARM_UP_STEPS - 1)
        return RankNow(
            program=rank.program,
            rank=number,
            pid=rank.pid,
            state=state,
            cpu_s=round(cpu_s, 2),
            io_bytes=io_bytes,
            step=step,
            steps=steps,
            age_s=round(max(0.0, self._monotonic() - max(last_s, not_before_s)), 1),
            typical_s=round((last_s - first_s) / timed, 4),
            longest_s=round(longest_s, 2),
            own_s=round(own_s, 4),
            own_steps=own_steps,
        )

    def _ask(self, rank: Rank) -> None:
        with contextlib.suppress(OSError, ValueError):
            asks = self._beat(rank)[10]
            rank.asked = rank.asked % 255 + 1
            pipe = os.open(
                self._root / str(rank.pid) / "fd" / str(asks), os.O_WRONLY | os.O_NONBLOCK
            )
            try:
                os.write(pipe, bytes([rank.asked]))
            finally:
                os.close(pipe)

    def _answer(self, rank: Rank) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            path = self._root / str(rank.pid) / "fd" / str(self._beat(rank)[11])
            with path.open("rb") as file:
                answer = json.loads(file.read(_MOST_ANSWER_BYTES))
            if isinstance(answer, dict) and answer.get("asked") == rank.asked:
                return answer
        return None

    def _rank_look(self, rank: Rank, answer: dict[str, Any] | None) -> RankLook:
        number = self._beat(rank)[2]
        return RankLook(
            program=rank.program,
            rank=number,
            answered=answer is not None,
            kernel=self._kernel(rank),
            stack=_stack(answer),
            flight=_flight(answer, number),
        )

    def _kernel(self, rank: Rank) -> str:
        """Return what the rank, and those of its children that wait for a file, wait for."""
        said = []
        for pid in (rank.pid, *rank.children[:16]):
            with contextlib.suppress(OSError):
                where = (self._root / str(pid) / "wchan").read_text().strip()
                if where not in {"", "0"}:
                    said.append(where if pid == rank.pid else f"child {where}")
        return ", ".join(dict.fromkeys(said))[:200]


def _stack(answer: dict[str, Any] | None) -> tuple[Frame, ...]:
    with contextlib.suppress(TypeError, ValueError, KeyError):
        frames = (answer or {}).get("stack") or []
        return tuple(
            Frame(str(file)[-300:], int(line), str(function)[:100])
            for file, line, function in frames[-_MOST_FRAMES:]
        )
    return ()


def _flight(answer: dict[str, Any] | None, rank: int) -> FlightRecord | None:
    with contextlib.suppress(Exception):  # what another version of torch records may be anything
        entries = ((answer or {}).get("flight") or {})["entries"]
        return FlightRecord(rank=rank, operations=operations(entries)[-_MOST_OPERATIONS:])
    return None


def _parent(process: Path) -> int:
    return int(_stat(process)[1])


def _state_and_cpu(process: Path) -> tuple[str, float]:
    """Return the state of a process, one letter, and the CPU time of all its threads in seconds."""
    fields = _stat(process)
    return fields[0].decode(), (int(fields[11]) + int(fields[12])) * _TICK_S


def _stat(process: Path) -> list[bytes]:
    """Return the fields of proc(5) from the third on; the second may hold anything."""
    fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) < 13:
        raise ValueError("no process")
    return fields


def _io_bytes(process: Path) -> int:
    """Return what a process read and wrote; 0 where the kernel does not count it."""
    try:
        lines = (process / "io").read_bytes().splitlines()
    except PermissionError:
        return 0
    return sum(int(line.split()[1]) for line in lines[:2])


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, ()):
        yield child
        yield from _below(child, children)
