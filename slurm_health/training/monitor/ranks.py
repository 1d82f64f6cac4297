# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job on this node: their heartbeats, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slurm_health import heartbeat
from slurm_health.records.decoding import from_json
from slurm_health.records.text import one_line
from slurm_health.system import proc
from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.collectives import Operation
from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import Frame
from slurm_health.training.monitor.flight_dumps import latest, record_of
from slurm_health.training.monitor.silent_ranks import (
    SCRIPT,
    AskedRecorder,
    Process,
    ask_recorder,
    dumps_of,
    outlived,
    silent_ranks,
)

_MARK = f"/memfd:{heartbeat.NAME} "  # how /proc shows it; the kernel adds "(deleted)"
_MOST_FRAMES = 40
_MOST_OPERATIONS = 64  # of a group: some steps, by which a step's own are known
_MOST_ANSWER_BYTES = 16 << 20
_POLL_S = 0.05
_NO_BEAT = -1
_NO_WORK = (0.0, heartbeat.UNKNOWN_REPLICA, b"")
_ASK, _ANSWER = 13, 14  # where a heartbeat has the open files by which to ask and to be answered


@dataclass(kw_only=True)
class Rank:
    """One rank, and the children that it had when it was looked for."""

    pid: int
    program: str
    rank: int  # as its environment tells it; its heartbeat may know better
    world: int = 0
    beat: int = _NO_BEAT  # the number of its open file
    children: tuple[int, ...] = ()
    asked: int = field(default=0)


class Ranks:
    """Finds the ranks of one job on one node.

    Those of `only_step` where that is named, else of all steps but `own_step`.
    """

    def __init__(
        self,
        job: str,
        node: str,
        own_step: str,
        monotonic: Callable[[], float] = time.monotonic,
        root: Path = Path("/proc"),
        *,
        variable: str = "SLURM_JOB_ID",
        only_step: str = "",
    ) -> None:
        self._job, self._node, self._own_step = job, node, own_step
        self._only_step = only_step
        self._variable = variable  # which is the job, in the environment of all its processes
        self._monotonic = monotonic
        self._root = root
        self._limits = proc.CpuLimits()
        self._ranks: list[Rank] = []
        self._beaten: set[tuple[str, int]] = set()
        self.outlived = False  # a rank has ended here and left something behind

    def find(self) -> None:
        """Look at all processes of this user's; takes some ms on a full node."""
        found: dict[tuple[int, int], Rank] = {}
        processes: dict[int, Process] = {}
        children: dict[int, list[int]] = {}
        for pid in sorted(self._pids()):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                seen = proc.stat(self._root / str(pid))
                children.setdefault(seen.parent, []).append(pid)
                process = self._process(pid, seen.parent, seen.group)
                if process is None:
                    continue
                processes[pid] = process
                for number, file in self._beats(pid):
                    # A forked child has its parent's file too, and a later start.
                    found.setdefault(file, _beating(process, number))
        self._beaten |= {(each.program, each.rank) for each in found.values()}
        self.outlived = outlived(processes)
        known = {(each.pid, each.beat): each for each in self._ranks}
        ranks = [*found.values(), *self._silent(processes, [each.pid for each in found.values()])]
        self._ranks = [known.get((each.pid, each.beat), each) for each in ranks]
        for each in self._ranks:
            each.children = tuple(_below(each.pid, children))

    def _silent(self, processes: Mapping[int, Process], beating: Collection[int]) -> list[Rank]:
        try:
            found = silent_ranks(
                processes,
                beating,
                arguments=lambda pid: self._text(pid, "cmdline").split("\0"),
                name=lambda pid: self._text(pid, "comm"),
                cpu_s=lambda pid: proc.stat(self._root / str(pid)).cpu_s,
            )
            # Children that outlive a rank with a heartbeat are not that rank.
            return [
                Rank(pid=each.pid, program=each.program, rank=each.rank, world=each.world)
                for each in found
                if (each.program, each.rank) not in self._beaten
            ]
        except (OSError, ValueError):  # one has ended meanwhile: the next look comes
            return []

    def _text(self, pid: int, name: str) -> str:
        return (self._root / str(pid) / name).read_text(errors="replace")

    def now(self, not_before_s: float = 0.0) -> list[RankNow]:
        """Return the ranks as they are; those that have ended are no longer among them.

        One without a heartbeat has no step, none so far, and no age.
        No age is older than what began at `not_before_s`: before that we did not run ourselves.
        """
        seen = []
        for each in list(self._ranks):
            try:
                seen.append(self._rank_now(each, not_before_s))
            except (OSError, ValueError):
                self._ranks.remove(each)
        return seen

    def alone(self) -> list[RankNow]:
        """Return how ranks are without their children, of which a node may have hundreds.

        Of a rank with a heartbeat it is not read.
        """
        seen = []
        for each in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                seen.append(self._alone(each))
        return seen

    def look(self, wait_s: float) -> list[RankLook]:
        """Ask all ranks where they are; return their answers in time, and the kernel's word."""
        beating = [each for each in self._ranks if each.beat != _NO_BEAT]
        for each in beating:
            self._ask(each)
        recorders = dict(self._recorders())
        until_s = self._monotonic() + wait_s
        answers: dict[int, dict[str, Any]] = {}
        # A rank tells its stack at once, and its flight record as soon as it has that.
        waited_for = beating
        while waited_for and self._monotonic() < until_s:
            for each in waited_for:
                if (answer := self._answer(each)) is not None:
                    answers[each.pid] = answer
            waited_for = [each for each in beating if "flight" not in answers.get(each.pid, {})]
            time.sleep(_POLL_S)
        dumped = dumps_of(recorders, until_s, _kept, self._monotonic)
        looks = []
        for each in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                look = self._rank_look(each, answers.get(each.pid))
                flight = dumped.get(each.pid, look.flight)
                looks.append(msgspec.structs.replace(look, flight=flight))
        return looks

    def _recorders(self) -> Iterator[tuple[int, AskedRecorder]]:
        """Ask the Flight Recorder of each rank without a heartbeat, and yield whom it was asked."""
        for each in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                process = self._root / str(each.pid)
                if each.beat == _NO_BEAT:
                    environ, directory = proc.environ_of(process), (process / "cwd").readlink()
                    if recorder := ask_recorder(each.rank, environ, directory):
                        yield each.pid, recorder

    def processes(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """Return the process of each rank, by program and number, and its children behind it."""
        return {(r.program, self._number(r)): (r.pid, *r.children) for r in self._ranks}

    def _pids(self) -> Iterator[int]:
        """Yield those of this user."""
        own = os.geteuid()
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.isdecimal():
                    with contextlib.suppress(OSError):
                        if entry.stat().st_uid == own:
                            yield int(entry.name)

    def _process(self, pid: int, parent: int, group: int) -> Process | None:
        """Return a process with what it belongs to, if that is a step of this job on this node."""
        environ = proc.environ_of(self._root / str(pid))
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
        ours = environ.get(self._variable) == self._job
        here = environ.get("SLURMD_NODENAME", self._node) == self._node
        if not (ours and here and self._is_watched(step)):
            return None
        rank, task = _whole(environ.get("RANK")), _whole(environ.get("SLURM_PROCID"))
        # Of the batch script, SLURM_NTASKS says what its steps may have.
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) if step else None
        world = _whole(tasks if rank is None else environ.get("WORLD_SIZE")) or 0
        return Process(pid, parent, group, step or SCRIPT, rank, task, world)

    def _is_watched(self, step: str) -> bool:
        if self._only_step:
            return step == self._only_step
        return not step or step != self._own_step

    def _beats(self, pid: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the heartbeats among a process's open files, and what makes each of them unique."""
        files = self._root / str(pid) / "fd"
        with os.scandir(files) as entries:
            for entry in entries:
                file = Path(entry.path)
                if str(file.readlink()).startswith(_MARK):
                    status = file.stat()
                    yield int(entry.name), (status.st_dev, status.st_ino)

    def _beat(self, rank: Rank) -> tuple[Any, ...]:
        """Read a heartbeat, and behind it tokens, replica and role.

        Raises:
            OSError: the process has ended.
            ValueError: it is none, or is being written at every look.
        """
        path = self._root / str(rank.pid) / "fd" / str(rank.beat)
        layout, work = heartbeat.LAYOUT, heartbeat.WORK_LAYOUT
        for _ in range(3):
            with path.open("rb", buffering=0) as file:
                data = file.read(layout.size + work.size)
            if len(data) >= layout.size:
                beat = layout.unpack(data[: layout.size])
                whole = beat[0] == heartbeat.MAGIC and beat[1] == beat[-1]
                if whole and len(data) < layout.size + work.size:
                    return *beat, *_NO_WORK  # a copy of the file that does not tell it yet
                if whole and (told := work.unpack(data[layout.size :]))[-1] == beat[1]:
                    return *beat, *told[:-1]
        raise ValueError("no heartbeat")

    def _alone(self, rank: Rank) -> RankNow:
        process = self._root / str(rank.pid)
        seen = proc.stat(process)
        if seen.state in "ZX":
            raise ValueError("it has ended")
        ran_s, unserved_s = proc.scheduled(process)
        return RankNow(
            program=rank.program,
            rank=rank.rank,
            pid=rank.pid,
            state=seen.state,
            cpu_s=round(seen.cpu_s, 2),
            io_bytes=proc.io_bytes(process),
            world=rank.world,
            ran_s=round(ran_s, 3),
            unserved_s=round(unserved_s, 3),
            wakes=proc.voluntary_switches(process),
        )

    def _rank_now(self, rank: Rank, not_before_s: float) -> RankNow:
        alone = self._alone(rank)
        cpu_s, moved_bytes = alone.cpu_s, alone.io_bytes
        for child in rank.children:
            with contextlib.suppress(OSError, ValueError):
                cpu_s += proc.stat(self._root / str(child)).cpu_s
                moved_bytes += proc.io_bytes(self._root / str(child))
        now = msgspec.structs.replace(
            alone,
            cpu_s=round(cpu_s, 2),
            io_bytes=moved_bytes,
            throttled_s=round(self._limits.throttled_s(self._root / str(rank.pid)), 3),
        )
        # One without a heartbeat tells no more.
        return now if rank.beat == _NO_BEAT else self._with_beat(now, rank, not_before_s)

    def _with_beat(self, now: RankNow, rank: Rank, not_before_s: float) -> RankNow:
        beat = self._beat(rank)
        number, step, steps, first_s, last_s, longest_s, own_s, own_steps = beat[2:10]
        loading_s, batches, data_ended = beat[10:13]
        tokens, replica, role = beat[-3:]
        timed = max(1, steps - heartbeat.WARM_UP_STEPS - 1)
        return msgspec.structs.replace(
            now,
            rank=number,
            step=step,
            steps=steps,
            age_s=round(max(0.0, self._monotonic() - max(last_s, not_before_s)), 1),
            typical_s=round((last_s - first_s) / timed, 4),
            longest_s=round(longest_s, 2),
            # What a rank waits for its data is its own, too.
            own_s=round(own_s + (loading_s if own_steps else 0.0), 4),
            own_steps=own_steps,
            loading_s=round(loading_s, 4),
            batches=batches,
            data_ended=data_ended,
            tokens=tokens,
            role=one_line(role.rstrip(b"\0").decode(errors="replace")),
            replica=replica,
        )

    def _ask(self, rank: Rank) -> None:
        with contextlib.suppress(OSError, ValueError):
            asks = self._beat(rank)[_ASK]
            rank.asked = rank.asked % 255 + 1
            path = self._root / str(rank.pid) / "fd" / str(asks)
            # By now the number may be that of another file, which a byte would spoil.
            if not stat.S_ISFIFO(path.stat().st_mode):
                return
            pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                    os.write(pipe, bytes([rank.asked]))
            finally:
                os.close(pipe)

    def _answer(self, rank: Rank) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            path = self._root / str(rank.pid) / "fd" / str(self._beat(rank)[_ANSWER])
            if not path.is_file():  # opening a FIFO waits for its other end
                return None
            with path.open("rb") as file:
                answer = from_json(file.read(_MOST_ANSWER_BYTES), object)
            if isinstance(answer, dict) and answer.get("asked") == rank.asked:
                return answer
        return None

    def _number(self, rank: Rank) -> int:
        """Return a rank's number; where no heartbeat tells it, as its environment does."""
        with contextlib.suppress(OSError, ValueError):
            if rank.beat != _NO_BEAT:
                return int(self._beat(rank)[2])
        return rank.rank

    def _rank_look(self, rank: Rank, answer: dict[str, Any] | None) -> RankLook:
        number = rank.rank if rank.beat == _NO_BEAT else self._beat(rank)[2]
        return RankLook(
            program=rank.program,
            rank=number,
            answered=answer is not None,
            kernel=proc.kernel_waits(self._root, rank.pid, rank.children),
            stack=_stack(answer),
            flight=_flight(answer, number),
        )


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
        flight = (answer or {}).get("flight") or {}
        return record_of(flight, rank, _kept)
    return None


def _kept(found: Sequence[Operation]) -> tuple[Operation, ...]:
    return latest(found, _MOST_OPERATIONS)


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _beating(process: Process, beat: int) -> Rank:
    number = heartbeat.UNKNOWN_RANK if process.number is None else process.number
    return Rank(
        pid=process.pid, program=process.program, rank=number, world=process.world, beat=beat
    )


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, ()):
        yield child
        yield from _below(child, children)
