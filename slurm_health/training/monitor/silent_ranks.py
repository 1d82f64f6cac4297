# SPDX-License-Identifier: Apache-2.0
"""Ranks without a heartbeat: which processes they are, by their environment and their parents.

srun gives each task SLURM_PROCID, torchrun each worker RANK; their children inherit it. So a rank
is the topmost process with a number, or what its shell or container runs.

PyTorch's Flight Recorder of such a rank is asked while it runs: where its environment names a pipe,
torch makes one for it, and leaves a dump when a line with a 1 comes through it. A thread of its own
reads the pipe, whatever the rank's main thread does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_health.training.diagnosis.collected import FlightRecord
from slurm_health.training.monitor.flight_dumps import Kept, prefixes, read_dump

SCRIPT = "script"  # what runs in the batch script itself belongs to no step
# What runs a training: torch calls its main thread so, for profilers.
_INTERPRETERS = ("python", "pypy", "pt_main")
_OURS = "slurm_health"
# Between a failure and a restart a torchrun that srun started has no ranks, and is none itself.
_TORCHRUN = ("torchrun", "torchrun_restarts.py", "torch.distributed.run")
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # to which torch adds the rank, and `.pipe`
_ASK = b"1\n"
_POLL_S = 0.05


class Process(NamedTuple):
    """A process of the job: `rank` is torchrun's number, `task` srun's, None where it has none.

    `group` is its process group, `world` how many ranks there are, 0 where that is not told.
    """

    pid: int
    parent: int
    group: int
    program: str
    rank: int | None
    task: int | None
    world: int = 0

    @property
    def number(self) -> int | None:
        """Its rank, as its heartbeat would tell it."""
        return self.task if self.rank is None else self.rank


class SilentRank(NamedTuple):
    """A rank without a heartbeat."""

    pid: int
    program: str
    rank: int
    world: int


def silent_ranks(
    processes: Mapping[int, Process],
    beating: Collection[int],
    *,
    arguments: Callable[[int], list[str]],
    name: Callable[[int], str],
    cpu_s: Callable[[int], float],
) -> Iterator[SilentRank]:
    """Yield the ranks of all programs that have no heartbeat.

    Args:
        processes: of this user in this job on this node, by number.
        beating: those with a heartbeat.
        arguments: the command line of a process,
        name: its name, as the kernel has it,
        cpu_s: and the CPU time that it used; each may raise OSError or ValueError.
    """
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    taken = {pid for beat in beating for pid in _line(beat, processes, children)}
    for program in sorted({each.program for each in processes.values()}):
        members = [each for each in processes.values() if each.program == program]
        for root, rank in _roots(members, processes, arguments, name):
            pid = _interpreter(root, children, name, cpu_s)
            no_rank = processes[root].rank is None and _is_torchrun(arguments(pid))
            if not no_rank and root not in taken and pid not in taken:
                yield SilentRank(pid, program, rank, processes[root].world)


def _is_torchrun(words: list[str]) -> bool:
    """Tell whether a command line runs torchrun, ours or torch's: right behind the interpreter."""
    return any(word.rpartition("/")[2] in _TORCHRUN for word in words[1:4])


def _is_orphan(process: Process, processes: Mapping[int, Process]) -> bool:
    """Tell whether a process has outlived its rank, as a data loader's worker may.

    What srun starts leads a process group.
    """
    return process.parent not in processes and process.group != process.pid


def _roots(
    members: list[Process],
    processes: Mapping[int, Process],
    arguments: Callable[[int], list[str]],
    name: Callable[[int], str],
) -> Iterator[tuple[int, int]]:
    """Yield the topmost process of each rank of a program, and its number."""
    by_torchrun = any(each.rank is not None for each in members)
    if not by_torchrun and members[0].program == SCRIPT:
        # One process that trains by itself; Slurm numbers all that a script starts alike.
        yield from ((pid, 0) for pid in _trainings(members, arguments, name))
        return
    for each in members:
        number = each.rank if by_torchrun else each.task
        above = processes.get(each.parent)
        same = above is not None and number == (above.rank if by_torchrun else above.task)
        if number is not None and not same and not _is_orphan(each, processes):
            yield each.pid, number


def _trainings(
    members: list[Process], arguments: Callable[[int], list[str]], name: Callable[[int], str]
) -> list[int]:
    """Return the interpreter that the script itself runs, where it is one; our own is not it.

    A process that is ending has given its memory back, and tells no command line: it could be ours.
    """
    theirs = {
        each.pid: each.parent
        for each in members
        if name(each.pid).startswith(_INTERPRETERS)
        and any(words := arguments(each.pid))
        and not any(word.startswith(_OURS) for word in words)
    }
    top = [pid for pid, parent in theirs.items() if parent not in theirs]
    return top if len(top) == 1 else []


def _interpreter(
    root: int,
    children: Mapping[int, list[int]],
    name: Callable[[int], str],
    cpu_s: Callable[[int], float],
) -> int:
    """Return what a shell or a container runs in the end: of several, what has worked most."""
    pid = root
    while not name(pid).startswith(_INTERPRETERS) and children.get(pid):
        pid = max(children[pid], key=cpu_s)
    return pid


def _line(
    pid: int, processes: Mapping[int, Process], children: Mapping[int, list[int]]
) -> Iterator[int]:
    """Yield a process, all below it, and those above it that have its number."""
    number = processes[pid].number
    above: Process | None = processes[pid]
    while above is not None and above.number == number:
        yield above.pid
        above = processes.get(above.parent)
    below = list(children.get(pid, ()))
    while below:
        each = below.pop()
        yield each
        below += children.get(each, ())


class AskedRecorder(NamedTuple):
    """Where a rank is asked, where it leaves its dump, and of when that was before."""

    rank: int
    pipe: Path
    dump: Path
    before_ns: int


def ask_recorder(rank: int, environ: Mapping[str, str], directory: Path) -> AskedRecorder | None:
    """Ask a rank with this environment, in this directory; None where it cannot be asked."""
    prefix = environ.get(PIPE, "")
    dumps = next(prefixes(environ), "")
    if not prefix or not dumps:
        return None
    pipe = directory / f"{prefix}{rank}.pipe"
    dump = directory / f"{dumps}{rank}"
    with contextlib.suppress(OSError):  # as where torch is too old to read it
        before_ns = _written_ns(dump)
        # Where none reads it, opening it fails at once; another file there is not written to.
        handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if stat.S_ISFIFO(os.fstat(handle).st_mode):
                os.write(handle, _ASK)
                return AskedRecorder(rank, pipe, dump, before_ns)
        finally:
            os.close(handle)
    return None


def dumps_of(
    asked: Mapping[int, AskedRecorder],
    until_s: float,
    kept: Kept,
    monotonic: Callable[[], float] = time.monotonic,
) -> dict[int, FlightRecord]:
    """Return what was dumped by then, by the same keys; a dump may be read while it is written."""
    found: dict[int, FlightRecord] = {}
    while len(found) < len(asked):
        for key, recorder in asked.items():
            if key not in found and (record := _dump_of(recorder, kept)) is not None:
                found[key] = record
        if len(found) == len(asked) or monotonic() >= until_s:
            break
        time.sleep(_POLL_S)
    return found


def _dump_of(recorder: AskedRecorder, kept: Kept) -> FlightRecord | None:
    with contextlib.suppress(OSError, ValueError, pickle.UnpicklingError):
        if _written_ns(recorder.dump) > recorder.before_ns:
            return read_dump(recorder.dump, recorder.rank, kept)
    return None


def _written_ns(path: Path) -> int:
    """Return when a file of this user was written, 0 where there is none."""
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return 0
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    return found.st_mtime_ns if ours else 0
