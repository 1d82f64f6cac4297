# SPDX-License-Identifier: Apache-2.0
"""The ranks of one job on one node: found among its processes, sampled, asked where they are."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slurm_health import heartbeat
from slurm_health.records.decoding import from_json
from slurm_health.records.text import one_line
from slurm_health.system import proc
from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.collectives import Operation
from slurm_health.training.diagnosis.samples import Frame, RankSample
from slurm_health.training.monitor.flight_dumps import latest, record_of
from slurm_health.training.monitor.gpu_activity import GpuActivity, activity, combined
from slurm_health.training.monitor.silent_ranks import (
    SCRIPT,
    AskedRecorder,
    Process,
    ask_recorder,
    dumps_of,
    silent_ranks,
)
from slurm_health.training.monitor.stacks import Stacks, read_stacks

_MARK = f"/memfd:{heartbeat.NAME} "  # how /proc shows it; the kernel adds "(deleted)"
_MOST_FRAMES = 40
_MOST_OPERATIONS = 64  # of a group: some steps, by which a step's own are known
_MOST_ANSWER_BYTES = 16 << 20
_ANSWER_S, _STACKS_S = 2.5, 3.0  # for heartbeats to answer, and for py-spy
_POLL_S = 0.05
_NO_BEAT = -1
_NO_WORK = (0.0, heartbeat.UNKNOWN_REPLICA, b"")
_ASK, _ANSWER = 13, 14  # where a heartbeat has the open files by which to ask and to be answered
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SETTLED_S = 60.0  # after its start: a process hardly executes another program by then
_NEW = Process(0, 0, 0, "", None, None)
_LIMITS_S = 18.0  # from one reading of a rank's CPU limits to the next
_SHORTEST_S = 0.5  # between two samples: less shows too little


@dataclass(kw_only=True)
class Rank:
    """One rank, the children that it had when it was last looked for, and how it has rested."""

    pid: int
    program: str
    rank: int  # by its environment; its heartbeat may know better
    world: int = 0
    beat: int = _NO_BEAT  # the number of its open file
    children: tuple[int, ...] = ()
    asked: int = 0
    latest: RankSample | None = None
    sampled_s: float = 0.0
    ran_s: float = 0.0  # when its main thread ran, and when anything of it moved
    moved_s: float = 0.0
    moves: int = 0
    longest_rest_s: float = 0.0
    gpu_waits: bool = False
    throttled_s: float = 0.0
    limits_again_s: float = 0.0


class Ranks:
    """Finds and samples the ranks of one job on one node.

    Args:
        job: the value of `variable` in the environment of all its processes.
        node: the name of this node.
        own_step: whose processes are no ranks.
        only_step: if named, its ranks alone.
        monotonic: seconds.
        root: of /proc.
    """

    def __init__(
        self,
        job: str,
        node: str,
        own_step: str = "",
        *,
        variable: str = "SLURM_JOB_ID",
        only_step: str = "",
        monotonic: Callable[[], float] = time.monotonic,
        root: Path = Path("/proc"),
    ) -> None:
        self._job, self._node, self._own_step = job, node, own_step
        self._only_step = only_step
        self._variable = variable
        self._monotonic = monotonic
        self._root = root
        self._limits = proc.CpuLimits()
        self._ranks: list[Rank] = []
        self._beaten: set[tuple[str, int]] = set()
        # By process and its start: what it belongs to does not change.
        self._known: dict[tuple[int, int], Process | None] = {}

    def find(self) -> None:
        """Look at all processes of this user; takes some ms on a full node."""
        beating: dict[tuple[int, int], Rank] = {}
        processes: dict[int, Process] = {}
        children: dict[int, list[int]] = {}
        known: dict[tuple[int, int], Process | None] = {}
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for pid in sorted(self._pids()):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                now = proc.stat(self._root / str(pid))
                children.setdefault(now.parent, []).append(pid)
                key = pid, now.start_ticks
                process = self._known.get(key, _NEW)
                if process is _NEW:
                    process = self._process(pid, now.parent, now.group)
                # A program that is executed keeps both, and may have another environment.
                if up_s - now.start_ticks * _TICK_S > _SETTLED_S:
                    known[key] = process
                if process is None:
                    continue
                processes[pid] = process._replace(parent=now.parent, group=now.group)
                for number, file in self._beats(pid):
                    # A forked child has its parent's file too, and a later start.
                    beating.setdefault(file, _beating(process, number))
        self._known = known
        self._beaten |= {(rank.program, rank.rank) for rank in beating.values()}
        before = {(rank.pid, rank.beat): rank for rank in self._ranks}
        ranks = [
            *beating.values(),
            *self._silent(processes, [rank.pid for rank in beating.values()]),
        ]
        self._ranks = [before.get((rank.pid, rank.beat), rank) for rank in ranks]
        for rank in self._ranks:
            rank.children = tuple(_below(rank.pid, children))

    def sample(self, not_before_s: float = 0.0) -> list[RankSample]:
        """Return the ranks as they are; those that have ended are no longer among them.

        No age is older than what began at `not_before_s`: before that we did not run ourselves.
        """
        samples = []
        for rank in list(self._ranks):
            try:
                sample = self._read(rank, not_before_s)
                samples.append(self._compared(rank, sample, not_before_s))
            except (OSError, ValueError):
                self._ranks.remove(rank)
        return samples

    def inspect(self, *, again: bool) -> tuple[list[RankSample], dict[str, str]]:
        """Return samples with where the ranks are; with all else that can be seen if `again`.

        Ranks that answer read and write. So the first look samples them after their answers, and
        the second before: what is between the two is their own.

        Returns:
            also why some of it cannot be seen.
        """
        samples = self._by_pid() if again else {}
        beating = [rank for rank in self._ranks if rank.beat != _NO_BEAT]
        for rank in beating:
            self._ask(rank)
        recorders = dict(self._recorders()) if again else {}
        until_s = self._monotonic() + _ANSWER_S
        answers: dict[int, dict[str, Any]] = {}
        # A rank answers with its stack at once, and with its flight record as soon as it has that.
        waited_for = beating
        while waited_for and self._monotonic() < until_s:
            for rank in waited_for:
                if (answer := self._answer(rank)) is not None:
                    answers[rank.pid] = answer
            waited_for = [rank for rank in beating if "flight" not in answers.get(rank.pid, {})]
            time.sleep(_POLL_S)
        dumped = dumps_of(recorders, until_s, _kept, self._monotonic)
        silent = [rank.pid for rank in self._ranks if rank.pid not in answers]
        stacks = read_stacks(silent, wait_s=_STACKS_S) if silent else Stacks()
        gpus = activity() if again else GpuActivity()
        for rank in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                rank.latest, rank.sampled_s = self._read(rank, 0.0), self._monotonic()
        samples = samples or self._by_pid()
        for rank in self._ranks:
            if (sample := samples.get(rank.pid)) is None:
                continue
            answer = answers.get(rank.pid)
            pids = (rank.pid, *rank.children)
            use = combined(gpus.by_pid[pid] for pid in pids if pid in gpus.by_pid)
            rank.gpu_waits = use.waits
            samples[rank.pid] = msgspec.structs.replace(
                sample,
                answered=answer is not None,
                stack=_stack(answer) or stacks.by_pid.get(rank.pid, ()),
                kernel=proc.kernel_waits(self._root, rank.pid, rank.children),
                flight=dumped.get(rank.pid) or _flight(answer, sample.rank),
                gpu_share=use.share,
                gpu_waits=use.waits,
            )
        reasons = {"stacks": stacks.why_not, "gpu-activity": gpus.why_not}
        return list(samples.values()), {what: why for what, why in reasons.items() if why}

    def _by_pid(self) -> dict[int, RankSample]:
        return {sample.pid: sample for sample in self.sample()}

    def _read(self, rank: Rank, not_before_s: float) -> RankSample:
        """Return how a rank is now.

        Raises:
            OSError: it has ended.
            ValueError: it has ended, or its heartbeat cannot be read.
        """
        process = self._root / str(rank.pid)
        now = proc.stat(process)
        if now.state in "ZX":
            raise ValueError("it has ended")
        ran_s, unserved_s = proc.scheduled(process)
        cpu_s, moved_bytes = now.cpu_s, proc.io_bytes(process)
        for child in rank.children:
            with contextlib.suppress(OSError, ValueError):
                cpu_s += proc.stat(self._root / str(child)).cpu_s
                moved_bytes += proc.io_bytes(self._root / str(child))
        sample = RankSample(
            program=rank.program,
            rank=rank.rank,
            node=self._node,
            pid=rank.pid,
            world=rank.world,
            state=now.state,
            cpu_s=round(cpu_s, 2),
            io_bytes=moved_bytes,
            ran_s=round(ran_s, 3),
            unserved_s=round(unserved_s, 3),
            throttled_s=self._throttled_s(rank, process),
            wakes=proc.voluntary_switches(process),
        )
        return sample if rank.beat == _NO_BEAT else self._with_beat(sample, rank, not_before_s)

    def _compared(self, rank: Rank, sample: RankSample, not_before_s: float) -> RankSample:
        """Return a sample with for how long its rank has rested, and been still."""
        now_s, before = self._monotonic(), rank.latest
        window_s = now_s - rank.sampled_s
        if before is None or before.steps > sample.steps or rank.sampled_s < not_before_s:
            rank.ran_s = rank.moved_s = now_s
        elif window_s < _SHORTEST_S:
            sample = msgspec.structs.replace(
                sample, rests=before.rests, polls=before.polls, cpu_share=before.cpu_share
            )
            return self._timed(rank, sample, now_s)
        else:
            sample = sample.since(before, window_s)
            if not sample.rests:
                rank.moves += 1
                rank.longest_rest_s = max(rank.longest_rest_s, rank.sampled_s - rank.ran_s)
                rank.ran_s = now_s
            # Where its GPU is known to wait, NCCL's threads spin beside its main one.
            if not sample.is_still(before, window_s) and not (sample.rests and rank.gpu_waits):
                rank.moved_s = now_s
        rank.latest, rank.sampled_s = sample, now_s
        return self._timed(rank, sample, now_s)

    @staticmethod
    def _timed(rank: Rank, sample: RankSample, now_s: float) -> RankSample:
        return msgspec.structs.replace(
            sample,
            rest_s=round(now_s - rank.ran_s, 1),
            still_s=round(now_s - rank.moved_s, 1),
            moves=rank.moves,
            longest_rest_s=round(rank.longest_rest_s, 1),
        )

    def _throttled_s(self, rank: Rank, process: Path) -> float:
        """Return what CPU limits have cost a rank; read seldom, as windows of steps are long."""
        if self._monotonic() >= rank.limits_again_s:
            rank.limits_again_s = self._monotonic() + _LIMITS_S
            rank.throttled_s = round(self._limits.throttled_s(process), 3)
        return rank.throttled_s

    def _with_beat(self, sample: RankSample, rank: Rank, not_before_s: float) -> RankSample:
        beat = self._beat(rank)
        number, step, steps, first_s, last_s, longest_s, own_s, own_steps = beat[2:10]
        loading_s, batches, data_ended = beat[10:13]
        tokens, replica, role = beat[-3:]
        timed = max(1, steps - heartbeat.WARM_UP_STEPS - 1)
        return msgspec.structs.replace(
            sample,
            rank=number if number != heartbeat.UNKNOWN_RANK else rank.rank,
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

    def _silent(self, processes: Mapping[int, Process], beating: Collection[int]) -> list[Rank]:
        """Return the ranks without a heartbeat; children that outlive one with are not that."""

        def text(pid: int, name: str) -> str:
            return (self._root / str(pid) / name).read_text(errors="replace")

        try:
            return [
                Rank(pid=rank.pid, program=rank.program, rank=rank.rank, world=rank.world)
                for rank in silent_ranks(
                    processes,
                    beating,
                    arguments=lambda pid: text(pid, "cmdline").split("\0"),
                    name=lambda pid: text(pid, "comm"),
                    cpu_s=lambda pid: proc.stat(self._root / str(pid)).cpu_s,
                )
                if (rank.program, rank.rank) not in self._beaten
            ]
        except (OSError, ValueError):  # one has ended meanwhile: the next search comes
            return [rank for rank in self._ranks if rank.beat == _NO_BEAT]

    def _recorders(self) -> Iterator[tuple[int, AskedRecorder]]:
        """Ask the Flight Recorder of each rank without a heartbeat, and yield those asked."""
        for rank in self._ranks:
            with contextlib.suppress(OSError, ValueError):
                process = self._root / str(rank.pid)
                if rank.beat == _NO_BEAT:
                    environ, directory = proc.environ_of(process), (process / "cwd").readlink()
                    if recorder := ask_recorder(rank.rank, environ, directory):
                        yield rank.pid, recorder

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
        watched = step == self._only_step if self._only_step else not step or step != self._own_step
        if not (ours and here and watched):
            return None
        rank, task = _whole(environ.get("RANK")), _whole(environ.get("SLURM_PROCID"))
        # Of the batch script, SLURM_NTASKS says what its steps may have.
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) if step else None
        # Whoever has no torchrun above it has as many peers as srun has tasks, whatever a script
        # says: a rendezvous for more never forms.
        by_torchrun = "TORCHELASTIC_RUN_ID" in environ or tasks is None
        world = environ.get("WORLD_SIZE") if rank is not None and by_torchrun else tasks
        return Process(pid, parent, group, step or SCRIPT, rank, task, _whole(world) or 0)

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
                    return *beat, *_NO_WORK  # a copy of the file that does not have it yet
                if whole and (behind := work.unpack(data[layout.size :]))[-1] == beat[1]:
                    return *beat, *behind[:-1]
        raise ValueError("no heartbeat")

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
        return record_of((answer or {}).get("flight") or {}, rank, _kept)
    return None


def _kept(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    return latest(operations, _MOST_OPERATIONS)


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
