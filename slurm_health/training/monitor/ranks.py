# SPDX-License-Identifier: Apache-2.0
"""The ranks of one job on one node: which processes they are, their samples, their places.

A rank with a heartbeat is the process that has it open. Else its environment identifies it: tasks
of srun have SLURM_PROCID, workers of torchrun have RANK, those of mpirun a number of its own, and
their children inherit it. So a rank is the topmost process with a number, or the program that its
shell or container runs. In a container a process may have lost the job's environment: then it is of
the job that its parent or its cgroup belongs to.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_health import heartbeat
from slurm_health.records.text import one_line
from slurm_health.system import proc
from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.diagnosis.samples import LAUNCHERS, Frame, RankSample, file_waits
from slurm_health.training.monitor.gpu_activity import GpuActivity, activity, combined
from slurm_health.training.monitor.voices import (
    Heartbeat,
    Recorder,
    Stacks,
    Voice,
    heartbeats,
    read_stacks,
)

SCRIPT = "script"  # processes of the batch script itself belong to no step
# The names of interpreters; torch renames its main thread for profilers.
_INTERPRETERS = ("python", "pypy", "pt_main")
_OURS = "slurm_health"
# Before its ranks start, and between a failure and a restart, a torchrun that srun started waits
# for those of the other nodes. `slurm-health run` is such a process too, and says so itself.
_TORCHRUN = ("torchrun", "torch.distributed.run")
_RUN = ("quiet_torchrun.py", "slurm-health", _OURS)
_ENDPOINT = ("--rdzv-endpoint", "--master-addr", "--master-port")
# Of Open MPI's mpirun and of Hydra's: which rank, of how many, and of which start.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"),
    ("PMI_RANK", "PMI_SIZE", "PMI_ID"),
)
_CGROUP = re.compile(r"/job_(\d+)/step_(\w+)")  # as slurmstepd names them, in both versions
_ANSWER_S, _STACKS_S = 2.5, 3.0  # for ranks to answer, and for py-spy
_POLL_S = 0.05
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SETTLED_S = 60.0  # after its start: a process hardly executes another program by then
_LIMITS_S = 18.0  # from one reading of a rank's CPU limits to the next


class JobProcess(NamedTuple):
    """A process of the job: `rank` is torchrun's number, `task` srun's, None without one.

    `group` is its process group, `world` is the number of ranks, 0 if unknown; `meets` is the
    address of its rendezvous.
    """

    directory: Path
    pid: int
    parent: int
    group: int
    program: str
    rank: int | None
    task: int | None
    world: int = 0
    meets: str = ""

    @property
    def number(self) -> int | None:
        """Its rank, by the numbers of heartbeats."""
        return self.task if self.rank is None else self.rank

    @property
    def is_interpreter(self) -> bool:
        """Whether it runs Python, by its name; raises OSError if it has ended."""
        return (self.directory / "comm").read_text(errors="replace").startswith(_INTERPRETERS)

    @property
    def words(self) -> list[str]:
        """Its command line; raises OSError if it has ended."""
        return (self.directory / "cmdline").read_text(errors="replace").split("\0")

    @property
    def is_training(self) -> bool:
        """Whether it is an interpreter of the user's.

        One that is ending has no command line any longer, and may be ours.
        """
        words = self.words if self.is_interpreter else []
        return any(words) and not any(word.startswith(_OURS) for word in words)


@dataclass(kw_only=True)
class Rank:
    """One rank, and its children at the last search."""

    pid: int
    program: str
    rank: int  # by its environment; its heartbeat prevails
    world: int = 0
    meets: str = ""
    voice: Voice = field(default_factory=Voice)
    key: tuple[int, int] = (0, 0)  # of its heartbeat
    children: tuple[int, ...] = ()
    throttled_s: float = 0.0
    limits_again_s: float = 0.0


class Whereabouts(NamedTuple):
    """The place of a rank, in the fields of a `RankSample`."""

    answered: bool
    stack: tuple[Frame, ...]
    kernel: str
    storage: str
    flight: FlightRecord | None
    gpu_share: float
    gpu_waits: bool


class Ranks:
    """Searches for and samples the ranks of one job on one node.

    Args:
        job: the value of `variable` in the environment of all its processes.
        node: the name of this node.
        own_step: the step whose processes are no ranks.
        only_step: the only step with ranks, empty for all.
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
        # By process and its start: its job and step do not change.
        self._known: dict[tuple[int, int], JobProcess | None] = {}
        self._hidden: set[int] = set()  # of the job, but their environments may not be read

    def find(self) -> None:
        """Search all processes of this user; takes some ms on a full node."""
        beating: dict[tuple[int, int], Rank] = {}
        processes: dict[int, JobProcess] = {}
        children: dict[int, list[int]] = {}
        known: dict[tuple[int, int], JobProcess | None] = {}
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        own, pids = os.geteuid(), []
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.isdecimal():
                    with contextlib.suppress(OSError):
                        if entry.stat().st_uid == own:
                            pids.append(int(entry.name))
        self._hidden &= {*pids}
        for pid in sorted(pids):
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                now = proc.stat(self._root / str(pid))
                children.setdefault(now.parent, []).append(pid)
                key = pid, now.start_ticks
                above = processes.get(now.parent)
                process = self._known[key] if key in self._known else self._process(now, above)
                # A newly executed program keeps both, and may have another environment.
                if up_s - now.start_ticks * _TICK_S > _SETTLED_S:
                    known[key] = process
                if process is None:
                    continue
                processes[pid] = process._replace(parent=now.parent, group=now.group)
                number = process.number
                for file, beat in heartbeats(process.directory):
                    # A forked child has its parent's file too, and a later start.
                    rank = Rank(
                        pid=pid,
                        program=process.program,
                        rank=heartbeat.UNKNOWN_RANK if number is None else number,
                        world=process.world,
                        meets=process.meets,
                        voice=Heartbeat(process.directory, file),
                        key=beat,
                    )
                    beating.setdefault(beat, rank)
        self._known = known
        self._beaten |= {(rank.program, rank.rank) for rank in beating.values()}
        before = {(rank.pid, rank.key): rank for rank in self._ranks}
        try:
            beats = [rank.pid for rank in beating.values()]
            silent = [
                rank
                for rank in ranks_without_heartbeat(processes, children, beats)
                # Children that outlive a rank with a heartbeat are not that rank.
                if (rank.program, rank.rank) not in self._beaten
            ]
        except (OSError, ValueError):  # one has ended meanwhile: the next search corrects it
            silent = [rank for rank in self._ranks if not isinstance(rank.voice, Heartbeat)]
        ranks = [*beating.values(), *silent]
        self._ranks = [before.get((rank.pid, rank.key), rank) for rank in ranks]
        for rank in self._ranks:
            rank.children = tuple(_below(rank.pid, children))

    def sample(self) -> list[RankSample]:
        """Return samples of the ranks, without those that have ended."""
        samples = []
        for rank in list(self._ranks):
            try:
                samples.append(self._read(rank))
            except (OSError, ValueError):
                self._ranks.remove(rank)
        return samples

    def locate(self, *, again: bool) -> tuple[dict[int, Whereabouts], dict[str, str]]:
        """Return the places of the ranks, by process; from all sources if `again`.

        To answer, a rank runs, reads and writes.

        Returns:
            also why some sources gave nothing.
        """
        asked = [r.voice for r in self._ranks if again or isinstance(r.voice, Heartbeat)]
        waiting = [voice for voice in asked if voice.ask()]
        until_s = self._monotonic() + _ANSWER_S
        while waiting and self._monotonic() < until_s:
            waiting = [voice for voice in waiting if not voice.poll()]
            time.sleep(_POLL_S if waiting else 0.0)
        silent = [rank.pid for rank in self._ranks if not rank.voice.answered]
        stacks = read_stacks(silent, wait_s=_STACKS_S) if silent else Stacks()
        gpus = activity() if again else GpuActivity()
        where = {}
        for rank in self._ranks:
            pids = (rank.pid, *rank.children)
            place = self._root, rank.pid, rank.children
            kernel = proc.kernel_waits(*place)
            storage = proc.remote_file(*place, proc.mounted()) if file_waits(kernel) else ""
            use = combined(gpus.by_pid[pid] for pid in pids if pid in gpus.by_pid)
            where[rank.pid] = Whereabouts(
                answered=rank.voice.answered,
                stack=rank.voice.stack or stacks.by_pid.get(rank.pid, ()),
                kernel=kernel,
                storage=storage,
                flight=rank.voice.flight,
                gpu_share=use.share,
                gpu_waits=use.waits,
            )
        hidden = f"{len(self._hidden)} hide their environments" if self._hidden else ""
        reasons = {"stacks": stacks.why_not, "gpu-activity": gpus.why_not, "ranks": hidden}
        return where, {what: why for what, why in reasons.items() if why}

    def _read(self, rank: Rank) -> RankSample:
        """Return a sample of a rank.

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
                beside = self._root / str(child)
                cpu_s += proc.stat(beside).cpu_s + proc.scheduled(beside)[1]
                moved_bytes += proc.io_bytes(beside)
        now_s = self._monotonic()
        if now_s >= rank.limits_again_s:  # seldom: windows of steps are long
            rank.limits_again_s = now_s + _LIMITS_S
            rank.throttled_s = round(self._limits.throttled_s(process), 3)
        sample = RankSample(
            program=rank.program,
            rank=rank.rank,
            node=self._node,
            pid=rank.pid,
            world=rank.world,
            meets=rank.meets,
            state=now.state,
            cpu_s=round(cpu_s, 2),
            io_bytes=moved_bytes,
            ran_s=round(ran_s, 3),
            unserved_s=round(unserved_s, 3),
            throttled_s=rank.throttled_s,
            wakes=proc.voluntary_switches(process),
        )
        if not isinstance(rank.voice, Heartbeat):
            return sample
        beat = rank.voice.read()
        timed = max(1, beat.steps - heartbeat.WARM_UP_STEPS - 1)
        return msgspec.structs.replace(
            sample,
            rank=beat.rank if beat.rank != heartbeat.UNKNOWN_RANK else rank.rank,
            step=beat.step,
            steps=beat.steps,
            age_s=round(max(0.0, now_s - beat.last_s), 1),
            typical_s=round((beat.last_s - beat.first_s) / timed, 4),
            longest_s=round(beat.longest_s, 2),
            # The waits of a rank for its data are its own, too.
            own_s=round(beat.own_s + (beat.loading_s if beat.own_steps else 0.0), 4),
            own_steps=beat.own_steps,
            loading_s=round(beat.loading_s, 4),
            batches=beat.batches,
            data_ended=beat.data_ended,
            tokens=beat.tokens,
            role=one_line(beat.role.rstrip(b"\0").decode(errors="replace")),
            replica=beat.replica,
        )

    def _process(self, now: proc.Stat, above: JobProcess | None) -> JobProcess | None:
        """Return a process with its step and number, if it is of this job and node.

        `above` is its parent, if that is of the job.
        """
        directory = self._root / str(now.pid)
        try:
            environ = proc.environ_of(directory)
        except PermissionError:
            contained = self.contained(now, {}, above)
            self._hidden |= {now.pid} if contained is not None else set()
            return contained
        if self._variable not in environ:
            return self.contained(now, environ, above)
        step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
        ours = environ.get(self._variable) == self._job
        here = environ.get("SLURMD_NODENAME", self._node) == self._node
        watched = step == self._only_step if self._only_step else not step or step != self._own_step
        if not (ours and here and watched):
            return None
        rank, task = _whole(environ.get("RANK")), _whole(environ.get("SLURM_PROCID"))
        # In the batch script, SLURM_NTASKS is the number of tasks that its steps may have.
        tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) if step else None
        # Without a torchrun above it, a rank has one peer per task of srun, whatever WORLD_SIZE is:
        # a rendezvous for more never forms.
        by_torchrun = "TORCHELASTIC_RUN_ID" in environ or tasks is None
        world = environ.get("WORLD_SIZE") if rank is not None and by_torchrun else tasks
        program = step or SCRIPT
        for of_rank, of_world, of_start in _MPI if rank is None else ():
            # All tasks that mpirun starts on a node have one SLURM_PROCID; some have no step.
            if of_rank in environ:
                rank, world = _whole(environ[of_rank]), environ.get(of_world)
                program = f"mpirun {environ.get(of_start, '') if of_start != 'PMI_ID' else step}"
        return JobProcess(
            directory=directory,
            pid=now.pid,
            parent=now.parent,
            group=now.group,
            program=program,
            rank=rank,
            task=task,
            world=_whole(world) or 0,
            meets=_meets(environ),
        )

    def contained(
        self,
        now: proc.Stat,
        environ: Mapping[str, str],
        above: JobProcess | None,
        cgroup: str | None = None,
    ) -> JobProcess | None:
        """Return a process without the job's environment, by its parent or its cgroup."""
        directory = self._root / str(now.pid)
        if above is None and self._variable == "SLURM_JOB_ID":
            if cgroup is None:
                cgroup = (directory / "cgroup").read_text(errors="replace")
            named = _CGROUP.search(cgroup)
            step = named[2] if named and named[1] == self._job else ""
            if step and step != self._own_step and step == (self._only_step or step):
                program = SCRIPT if step == "batch" else step
                above = JobProcess(directory, 0, 0, 0, program, rank=None, task=None)
        if above is None:
            return None
        rank = _whole(environ.get("RANK"))
        return above._replace(
            directory=directory,
            pid=now.pid,
            parent=now.parent,
            group=now.group,
            rank=above.rank if rank is None else rank,
            world=_whole(environ.get("WORLD_SIZE")) or above.world,
            meets=_meets(environ) or above.meets,
        )


def ranks_without_heartbeat(
    processes: Mapping[int, JobProcess],
    children: Mapping[int, list[int]],
    beating: Collection[int],
) -> Iterator[Rank]:
    """Yield the ranks of all programs that have no heartbeat.

    Args:
        processes: of this user in this job on this node, by number.
        children: of each process.
        beating: the processes with a heartbeat.

    Raises:
        OSError: a process has ended.
        ValueError: the same.
    """
    # By a heartbeat: its process, all below it, those above with its number.
    claimed = set[int]()
    for pid in beating:
        claimed |= {pid, *_below(pid, children)}
        above: JobProcess | None = processes[pid]
        while above is not None and above.number == processes[pid].number:
            claimed.add(above.pid)
            above = processes.get(above.parent)
    # The daemons by which mpirun starts ranks are tasks of srun, and no ranks.
    for process in processes.values():
        launcher = processes.get(process.parent)
        while launcher is not None and launcher.program != process.program:
            claimed.add(launcher.pid)
            launcher = processes.get(launcher.parent)
    for program in sorted({process.program for process in processes.values()}):
        members = [process for process in processes.values() if process.program == program]
        for root, number in _roots(members, processes):
            leaf = root
            while not leaf.is_interpreter:  # a shell or a container: its busiest child
                below = [processes[p] for p in children.get(leaf.pid, ()) if p in processes]
                if not below:
                    break
                leaf = max(below, key=lambda process: proc.stat(process.directory).cpu_s)
            # torchrun, ours or torch's, stands right behind the interpreter.
            names = [word.rpartition("/")[2] for word in leaf.words[1:4]]
            launches = root.rank is None and not {*_TORCHRUN}.isdisjoint(names)
            is_ours = root.rank is None and not {*_RUN}.isdisjoint(names)
            if is_ours or claimed & {root.pid, leaf.pid} or (launches and program == SCRIPT):
                continue
            yield Rank(
                pid=leaf.pid,
                program=program + (LAUNCHERS if launches else ""),
                rank=number,
                world=max(root.world, leaf.world),
                meets=_endpoint(leaf.words) if launches else leaf.meets,
                voice=Recorder(number, leaf.directory),
            )


def _roots(
    members: list[JobProcess], processes: Mapping[int, JobProcess]
) -> Iterator[tuple[JobProcess, int]]:
    """Yield the topmost process of each rank of a program, and its number."""
    by_torchrun = any(process.rank is not None for process in members)
    if not by_torchrun and members[0].program == SCRIPT:
        # One interpreter that trains by itself; Slurm numbers all that a script starts alike.
        theirs = {process.pid: process for process in members if process.is_training}
        top = [process for process in theirs.values() if process.parent not in theirs]
        if len(top) == 1:
            yield top[0], 0
        return
    for process in members:
        number = process.rank if by_torchrun else process.task
        above = processes.get(process.parent)
        same = above is not None and number == (above.rank if by_torchrun else above.task)
        if number is not None and not same and not (above is None and _is_orphan(process)):
            yield process, number


def _is_orphan(process: JobProcess) -> bool:
    """Whether a process without a parent of the job has lost it, as a data loader's worker does.

    slurmstepd starts all tasks of a step on a node, and puts them into the first one's group. Where
    /proc hides other users' processes (hidepid), the parent of a task cannot be read.
    """
    if process.group == process.pid:
        return False
    try:
        return proc.stat(process.directory.parent / str(process.parent)).name != "slurmstepd"
    except (OSError, ValueError):
        return process.parent == 1


def _meets(environ: Mapping[str, str]) -> str:
    address = environ.get("MASTER_ADDR", "")
    return f"{address}:{environ['MASTER_PORT']}" if address and "MASTER_PORT" in environ else ""


def _endpoint(words: Sequence[str]) -> str:
    """Return the address at which a torchrun meets the others, by its command line."""
    named = {}
    for word, following in pairwise(words):
        name, _, value = word.partition("=")
        named[name.replace("_", "-")] = value or following
    endpoint, address, port = (named.get(name, "") for name in _ENDPOINT)
    return endpoint or (f"{address}:{port}" if address and port else "")


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else None


def _below(pid: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    for child in children.get(pid, ()):
        yield child
        yield from _below(child, children)


def located(
    samples: Sequence[RankSample], where: Mapping[int, Whereabouts]
) -> tuple[RankSample, ...]:
    """Return samples with the places of their ranks."""
    return tuple(
        msgspec.structs.replace(sample, **where[sample.pid]._asdict())
        if sample.pid in where
        else sample
        for sample in samples
    )
