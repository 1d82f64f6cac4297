# SPDX-License-Identifier: Apache-2.0
"""How each rank failed: one answer from what its traceback, torchrun and srun say."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.last_words import is_consequence

# Names of signals as strsignal(3) words them, with which srun tells of a task's end.
SIGNALS = {
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
    "Hangup": 1,
    "Illegal instruction": 4,
    "Interrupt": 2,
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Terminated": 15,
    "User defined signal 1": 10,
    "User defined signal 2": 12,
}
# Signals that end a process which does not handle them, as exit statuses tell of them: a shell adds
# 128, a Python that passes a child's negative status on takes it from 256.
_ENDING = (4, 6, 7, 8, 9, 11, 15)
# How launchers and frameworks tell of a process that ended, each with its rank if they say it.
_LAUNCHERS = tuple(
    re.compile(pattern)
    for pattern in (
        # DeepSpeed: [launch.py:324:sigkill_handler] ['python', …] exits with return code = -9
        r"\[launch\.py:\d+:\w+\] .* exits with return code = (?P<code>-?\d{1,3})$",
        # failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: python
        r"failed \(exitcode: (?P<code>-?\d{1,3})\) local_rank: \d{1,4} \(pid",
        # Horovod: Process 1 exit with status code 137.
        r"^Process (?P<rank>\d{1,6}) exit with status code (?P<code>\d{1,3})\.?$",
        # MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD
        r"^MPI_ABORT was invoked on rank (?P<rank>\d{1,6}) in communicator MPI_COMM_WORLD",
        # mpirun noticed that process rank 3 with PID 77 on node n2 exited on signal 9 (Killed).
        r"rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on signal (?P<signal>\d+)",
        # MPICH: =   EXIT CODE: 139
        r"^=\s+EXIT CODE: (?P<code>\d{1,3})$",
        # torch.multiprocessing: process 3 terminated with signal SIGKILL
        r"process (?P<rank>\d{1,6}) terminated with signal (?P<name>SIG[A-Z]+)",
        # subprocess: died with <Signals.SIGKILL: 9>
        r"died with <Signals\.SIG\w+: (?P<signal>\d{1,2})>",
        # joblib: The exit codes of the workers are {SIGKILL(-9)}
        r"exit codes of the workers are \{(?P<name>SIG[A-Z]+)\(-\d+\)",
    )
)
_OF_A_LAUNCHER = re.compile(r"exit|EXIT|signal|SIG|MPI_ABORT")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
# Of a type: a line such as `usage: train.py` that came in between is none.
_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*(?:_*[A-Z]\w*|(?<=\.)(?:error|timeout|gaierror|herror))(?::\s.*|:)?$"
)
_NATIVE = re.compile(r"(?:\w+::)+\w+")
_CHAINED = re.compile(r"(During handling of the above|The above exception was the direct cause)")
_WHAT = re.compile(r"\s+what\(\):\s*(?P<text>.*)")
_NCCL_RESULT = re.compile(r"nccl[A-Z]\w+: ")  # the name of the result, in a line of its own
_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
_NOT_WAITS = frozenset({"wrapper", "_wait", "wait"})
# How the exception begins with which NCCL's watchdog ends a process that may have raised before.
_WATCHDOG = "Process group watchdog thread terminated"


def signal_of(exit_code: int) -> int:
    """Return the signal that an exit status stands for, 0 for none: 137 and 247 are SIGKILL."""
    return next((n for n in _ENDING if exit_code in (128 + n, 256 - n)), 0)


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank, or one task whose rank is not known, failed.

    Args:
        rank: its number in the training, None where nothing says it.
        node: where it ran, as the source calls it; empty where it is not told.
        error: the exception with its text, `KeyError: 'lr'`; of a chain, the first.
        place: the deepest line of the user's own code in its traceback.
        raises: that line is a `raise`: the script itself ended, and knew why.
        waits_in: the collective that it was in, `all_gather`, or `backward`.
        loading: it was in `torch.load`.
        exit_code: 0 where none is told.
        signal: by which it was killed, 0 for none.
        at: the place of the first line about it in the output, to tell which was first.
        line: what the output says of it, in a line.
        consequence: it is what ranks do when another one has failed.
        cut: it began to tell of an exception, whose words are lost.
        bare: nothing but a line with an exception tells of it: it may have been dealt with.
    """

    rank: int | None = None
    node: str = ""
    error: str = ""
    place: str = ""
    raises: bool = False
    waits_in: str = ""
    loading: bool = False
    exit_code: int = 0
    signal: int = 0
    at: int = 0
    line: str = ""
    consequence: bool = False
    cut: bool = False
    bare: bool = False


def launcher_end(text: str, at: int) -> RankFailure | None:
    """Return the end of a process of which a line of a launcher or framework tells, else None."""
    if not _OF_A_LAUNCHER.search(text):
        return None
    match = next((match for pattern in _LAUNCHERS if (match := pattern.search(text))), None)
    if match is None:
        return None
    told = match.groupdict()
    code, rank = int(told.get("code") or 0), told.get("rank")
    number = int(told.get("signal") or 0) or max(-code, 0) or signal_of(code)
    if name := told.get("name"):
        number = getattr(signal, name, signal.SIGKILL).value
    return RankFailure(
        rank=int(rank) if rank else None,
        node=(told.get("node") or "").partition(".")[0],
        exit_code=max(code, 0),
        signal=number,
        at=at,
        line=one_line(text)[:300],
        consequence=number == SIGNALS["Terminated"],
    )


class Traceback(msgspec.Struct):
    """A traceback that is being read, and those it is chained to."""

    at: int
    rank: int | None
    task: int | None
    error: str = ""
    place: str = ""
    waits_in: str = ""
    loading: bool = False
    inside: bool = True
    own: bool = False  # the frame before is of the user's own code
    raises: bool = False
    placed: bool = False  # of a chain the first traceback with a line of the user's counts
    original: bool = False
    chained: bool = False
    nccl: bool = False  # its exception is one of NCCL's, which has several lines
    last_error: bool = False  # the next of them is the last, and says the cause


def merged(
    tracebacks: list[Traceback],
    ended: list[RankFailure],
    tasks: dict[int, RankFailure],
    watchdogs: dict[int | None, RankFailure],
    of_groups: dict[int | None, RankFailure],
) -> tuple[RankFailure, ...]:
    """Return one failure per rank from what its traceback, torchrun, srun and NCCL say of it.

    `watchdogs` are those that NCCL's watchdog ended: it aborts the process, which is no crash.
    Before torch 2.2 none says its rank, but what its number is `of_groups`: in that of all, the
    rank. A rank of that number that was aborted is taken for the one.
    """
    found = _merged(tracebacks, ended, tasks)
    named = {each.rank for each in found}
    # One whose rank is not told tells nothing new of processes that are known to have failed.
    known = named or watchdogs.keys() - {None}
    rest = [
        each
        for rank, each in watchdogs.items()
        if rank not in named and not (rank is None and known)
    ]
    told = [_by_watchdog(each, {**of_groups, **watchdogs}) for each in found]
    return tuple(sorted([*told, *rest], key=lambda each: each.at))


def _by_watchdog(end: RankFailure, watchdogs: Mapping[int | None, RankFailure]) -> RankFailure:
    """Return the end of a rank with what its watchdog said, where that ended it."""
    watchdog = watchdogs.get(end.rank) if end.rank is not None else None
    aborted = SIGNALS["Aborted"] in {end.signal, end.exit_code - 128}
    if watchdog is None or end.error or not aborted:
        return end
    return msgspec.structs.replace(
        watchdog, rank=end.rank, node=end.node, signal=end.signal, waits_in=""
    )


def watchdog_end(rank: int | None, error: str, at: int) -> RankFailure:
    """Return the end of a rank by its watchdog, with the exception that this told."""
    who = f"rank {rank}" if rank is not None else "a process"
    return RankFailure(
        rank=rank,
        error=error,
        at=at,
        line=f"{who}: {error}",
        consequence=is_consequence(error),
    )


def _merged(
    tracebacks: list[Traceback], ended: list[RankFailure], tasks: dict[int, RankFailure]
) -> tuple[RankFailure, ...]:
    by_torchrun = {each.rank: each for each in ended}
    # Without torchrun a task of srun is a rank.
    known = by_torchrun or {each.rank: each for each in tasks.values()}
    raised: dict[int, RankFailure] = {}
    unnamed: list[RankFailure] = []
    for each in tracebacks:
        if not each.error or "ChildFailedError" in each.error:
            continue
        rank = each.rank if each.rank is not None or by_torchrun else each.task
        end = known.get(rank) if rank is not None else None
        failure = _raised(each, rank, end)
        if rank is None:
            unnamed.append(failure)
        elif rank not in raised or raised[rank].consequence or _WATCHDOG not in failure.error:
            raised[rank] = failure  # a rank that was restarted: its last one counts
    if not raised and unnamed:
        return tuple(_of_unnamed(unnamed, known))
    if not raised:
        known = _with_lost_words(tracebacks, known)
    rest = [_ended(each) for rank, each in known.items() if rank not in raised]
    if by_torchrun:
        rest += [_ended(each) for each in _killed_launchers(tasks)]
    return tuple(sorted([*raised.values(), *rest], key=lambda each: each.at))


def _with_lost_words(
    tracebacks: list[Traceback], known: dict[int | None, RankFailure]
) -> dict[int | None, RankFailure]:
    """Mark the ends of ranks whose traceback breaks off: the step was ended while they wrote it."""
    lost = [traceback for traceback in tracebacks if not traceback.error]
    ends = [end for end in known.values() if end.exit_code == 1 and not end.signal]
    if not lost or not ends:
        return known
    first = min(ends, key=lambda end: end.at)
    named = [(traceback, known.get(traceback.rank or traceback.task)) for traceback in lost]
    traceback, end = next(((one, end) for one, end in named if end in ends), (lost[0], first))
    assert end is not None
    marked = msgspec.structs.replace(end, cut=True, place=traceback.place, at=traceback.at)
    return {**known, end.rank: marked}


def _killed_launchers(tasks: dict[int, RankFailure]) -> list[RankFailure]:
    """Return the tasks that were killed where a task is a torchrun, which then told nothing."""
    return [msgspec.structs.replace(each, rank=None) for each in tasks.values() if each.signal]


def _raised(traceback: Traceback, rank: int | None, end: RankFailure | None) -> RankFailure:
    if passed_on := launcher_end(traceback.error, traceback.at):
        return passed_on
    who = f"rank {rank}: " if rank is not None else ""
    return RankFailure(
        rank=rank,
        node=end.node if end else "",
        error=traceback.error,
        place=traceback.place,
        raises=traceback.raises,
        waits_in=traceback.waits_in,
        loading=traceback.loading,
        exit_code=end.exit_code if end else 0,
        signal=end.signal if end and end.signal != SIGNALS["Terminated"] else 0,
        at=traceback.at,
        line=f"{who}{traceback.error}" + (f" ({traceback.place})" if traceback.place else ""),
        consequence=is_consequence(traceback.error),
    )


def _ended(end: RankFailure) -> RankFailure:
    # torchrun and srun end the other ranks with SIGTERM, and what does not end with SIGKILL.
    by_launcher = end.consequence or end.signal == SIGNALS["Terminated"]
    return msgspec.structs.replace(end, consequence=by_launcher)


def _of_unnamed(
    unnamed: list[RankFailure], known: dict[int | None, RankFailure]
) -> Iterator[RankFailure]:
    """Yield failures whose tracebacks name no rank, with the ranks that can only have been theirs.

    A program may print tracebacks of what it got over, so an exception counts once.
    """
    errors = {each.error: each for each in reversed(unnamed)}
    alike = [rank for rank, end in known.items() if end.exit_code and not end.signal]
    if len(errors) == 1 and _NATIVE.match(next(iter(errors))):
        # An exception of C++ that nothing catches aborts its process.
        alike += [rank for rank, end in known.items() if end.signal == SIGNALS["Aborted"]]
    if len(errors) == 1 and alike:
        for rank in alike:
            end = known[rank]
            yield msgspec.structs.replace(
                unnamed[0], rank=rank, node=end.node, exit_code=end.exit_code
            )
    else:
        yield from sorted(errors.values(), key=lambda each: each.at)
    for rank, end in known.items():
        if rank not in alike:
            yield _ended(end)


def failed_ranks(failures: Iterable[RankFailure]) -> tuple[int, ...]:
    """Return the ranks that are known, in order."""
    return tuple(sorted({each.rank for each in failures if each.rank is not None}))


def nodes_of(failures: Iterable[RankFailure]) -> tuple[str, ...]:
    """Return the nodes that are known, in order."""
    return tuple(sorted({each.node for each in failures if each.node}))


def continued(current: Traceback, text: str) -> bool:
    """Read a line that may belong to a traceback that has begun; tell whether it does."""
    if what := _WHAT.match(text):
        if current.error and not current.inside and "what():" not in current.error:
            current.error = one_line(f"{current.error}: {what['text']}")[:300]
            current.nccl = "NCCL error" in text
        return True
    if not current.inside:
        current.chained |= _CHAINED.match(text) is not None
        return current.nccl and _of_nccl(current, text)
    if frame := _FRAME.match(text):
        if not current.placed:
            _see_frame(current, frame)
        return True
    if text[:1].isspace() or not text:
        if current.own and text.strip():
            current.raises, current.own = text.lstrip().startswith("raise "), False
        return True
    current.inside = False
    current.placed = bool(current.place)
    is_exception = _EXCEPTION.match(text) is not None
    if is_exception and (not current.error or current.original):
        current.error = one_line(text)[:300]
        current.nccl = "NCCL error" in text
    current.chained = False
    return is_exception


def _of_nccl(current: Traceback, text: str) -> bool:
    """Read a further line of an exception of NCCL, whose cause is the last of them."""
    if text.startswith("Last error:"):
        current.last_error = True
        return True
    if current.last_error:
        current.nccl = current.last_error = False
        if text.strip():
            current.error = one_line(f"{current.error}: {text.strip()}")[:500]
        return True
    return _NCCL_RESULT.match(text) is not None


def _see_frame(current: Traceback, frame: re.Match[str]) -> None:
    file, function = frame["file"], frame["function"] or ""
    current.own = not any(mark in file for mark in _OF_A_LIBRARY)
    current.raises = False
    if current.own:
        current.place = f"{file.rpartition('/')[2]}:{frame['line']}"
        current.waits_in, current.loading = "", False
    elif file.endswith("torch/serialization.py"):
        current.loading |= function == "load"
    elif function == "_engine_run_backward":
        current.waits_in = "backward"
    elif file.endswith("torch/distributed/distributed_c10d.py") and function not in _NOT_WAITS:
        current.waits_in = current.waits_in or function
