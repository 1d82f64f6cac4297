# SPDX-License-Identifier: Apache-2.0
"""What a job's output says of its end: tracebacks of ranks, torchrun's summary, Slurm's own lines.

Any text is read; what is not known is passed over. Ranks are told apart by the prefixes that torch
(`[rank3]:`), torchrun (`[default3]:`) and `srun --label` (`3: `) put before their lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from slurm_health.core.diagnosis.consequences import is_consequence
from slurm_health.core.nodeset import expand
from slurm_health.core.text import one_line

_LINE_CHARACTERS = 2000  # of a line; an exception may hold a whole tensor
_MOST_FAILURES = 16_384  # that are read; a job of that many ranks is not known to us
_KEPT = 500  # of each kind, the first ones: enough to tell all ranks from some
_MOST_NOTES = 200
_MOST_FRAMES = 200

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(
    r"(?:\s{0,6}(?P<task>\d{1,6}): ?)?"
    r"(?:\[(?!rank\d)[A-Za-z_]+\d{1,6}\]:\s?)?"
    r"(?:\[rank(?P<rank>\d{1,6})\]:\s?)?"
)
_TRACEBACK = re.compile(r"(?P<original>Original )?Traceback \(most recent call last\):")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s.*|:)?$")
_CHAINED = re.compile(r"(During handling of the above|The above exception was the direct cause)")
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']*)'")
_WHAT = re.compile(r"\s+what\(\):\s*(?P<text>.*)")
_ITEM = re.compile(r"\s{2}(?P<key>time|host|rank|exitcode)\s*: (?P<value>.+)")
# srun: error: n[3-4]: tasks 2-3: Exited with exit code 1
_TASK = re.compile(
    r"srun: error: (?P<nodes>[^\s:]+): tasks? (?P<tasks>[\d,-]+):"
    r" (?P<how>.+?)(?: \(core dumped\))?$"
)
_EXITED = re.compile(r"Exited with exit code (\d+)")
# What Slurm, the kernel and the driver say of a job in a line of their own.
_NOTE = re.compile(
    r"(oom[_-]kill|Out Of Memory|Out of memory: Killed|Memory cgroup out of memory"
    r"|Node failure on|CANCELLED AT|Exceeded job memory limit|NVRM: Xid|SXid"
    r"|Node \S+ has failed|Communication connection failure)"
)
_CANCELLED_AT = re.compile(r"\*\*\* JOB \S+ ON \S+ CANCELLED AT (?P<time>[\dT:-]{19})")
_OF_A_LIBRARY = ("site-packages/", "dist-packages/", "/lib/python", "<frozen", "<string>")
# Names of signals as strsignal(3) words them, with which srun tells of a task's end.
_SIGNALS = {
    "Aborted": 6,
    "Bus error": 7,
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Terminated": 15,
}
_NOT_WAITS = frozenset({"wrapper", "_wait", "wait"})


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank, or one task whose rank is not known, failed.

    Args:
        rank: its number in the training, None where nothing says it.
        node: where it ran, as whoever tells calls it; empty where nobody does.
        error: the exception with its text, `KeyError: 'lr'`; of a chain, the first.
        place: the deepest line of the user's own code in its traceback.
        waits_in: the collective that it was in, `all_gather`, or `backward`.
        exit_code: 0 where none is told.
        signal: by which it was killed, 0 for none.
        at: the place of the first line about it in the output, to tell which was first.
        line: what the output says of it, in a line.
        consequence: it is what ranks do when another one has failed.
    """

    rank: int | None = None
    node: str = ""
    error: str = ""
    place: str = ""
    waits_in: str = ""
    exit_code: int = 0
    signal: int = 0
    at: int = 0
    line: str = ""
    consequence: bool = False


class TrainingLog(msgspec.Struct, frozen=True, kw_only=True):
    """What the output says: failures in the order in which they came, and lines of the system.

    Of very many failures the first are kept; `failed` counts all. `sources` names the files; `cut`
    is set where only the end of one was read.
    """

    failures: tuple[RankFailure, ...] = ()
    failed: int = 0
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    cut: bool = False

    @property
    def of_their_own(self) -> tuple[RankFailure, ...]:
        """The failures that are no consequence of another one."""
        return tuple(each for each in self.failures if not each.consequence)


class _Traceback(msgspec.Struct):
    """A traceback that is being read, and those it is chained to."""

    at: int
    rank: int | None
    task: int | None
    error: str = ""
    place: str = ""
    waits_in: str = ""
    inside: bool = True
    placed: bool = False  # of a chain the first traceback with a line of the user's counts
    original: bool = False
    chained: bool = False


class _Reading:
    """Reads lines one by one, each rank's apart from the others."""

    def __init__(self) -> None:
        self.open: dict[str, _Traceback] = {}
        self.done: list[_Traceback] = []
        self.ended: list[RankFailure] = []
        self.tasks: dict[int, RankFailure] = {}
        self.notes: list[str] = []
        self._items: dict[str, dict[str, str]] = {}

    def line(self, at: int, whole: str) -> None:
        prefix = _PREFIX.match(whole)
        assert prefix is not None  # it may be empty
        text = whole[prefix.end() :]
        stream = prefix[0].strip()
        rank = int(prefix["rank"]) if prefix["rank"] else None
        task = int(prefix["task"]) if prefix["task"] else None
        if self._traceback(at, stream, text, rank, task):
            return
        if text[:2] == "  ":
            self._summary(at, stream, text)
        elif text.startswith("srun: error: "):
            self._task(at, text)
        if _NOTE.search(text) and len(self.notes) < _MOST_NOTES:
            self.notes.append(one_line(text)[:300])

    def _traceback(
        self, at: int, stream: str, text: str, rank: int | None, task: int | None
    ) -> bool:
        """Read a line of a traceback; tell whether it was one."""
        current = self.open.get(stream)
        if begun := _TRACEBACK.search(text):
            original = begun["original"] is not None
            if current is None or not (current.chained or original):
                self._finish(stream)
                self.open[stream] = _Traceback(at=at, rank=rank, task=task, original=original)
            else:
                current.inside, current.original = True, original
            return True
        if terminated := _TERMINATED.search(text):
            self._finish(stream)
            error = terminated["type"]
            self.open[stream] = _Traceback(at=at, rank=rank, task=task, error=error, inside=False)
            return True
        if current is None:
            return False
        return _continued(current, text)

    def _finish(self, stream: str) -> None:
        if (current := self.open.pop(stream, None)) and len(self.done) < _MOST_FAILURES:
            self.done.append(current)

    def _summary(self, at: int, stream: str, text: str) -> None:
        item = _ITEM.match(text)
        if item is None:
            return
        said = self._items.setdefault(stream, {})
        said[item["key"]] = item["value"].strip()
        if item["key"] != "exitcode":
            return
        del self._items[stream]
        rank = re.match(r"\d{1,6}\b", said.get("rank", ""))
        code = re.match(r"-?\d{1,4}\b", said["exitcode"])
        if rank and code and len(self.ended) < _MOST_FAILURES:
            number = int(code[0])
            node = said.get("host", "")
            self.ended.append(
                RankFailure(
                    rank=int(rank[0]),
                    node="" if node.startswith("localhost") else node.partition(".")[0],
                    exit_code=max(number, 0),
                    signal=max(-number, 0),
                    at=at,
                    line=f"torchrun: rank {rank[0]} on {node or 'a node'}: "
                    + (f"signal {-number}" if number < 0 else f"exit code {number}"),
                )
            )

    def _task(self, at: int, text: str) -> None:
        match = _TASK.match(text)
        if match is None:
            return
        how = match["how"]
        exited = _EXITED.match(how)
        try:
            nodes = expand(match["nodes"])
            tasks = [int(each.lstrip("t")) for each in expand(f"t[{match['tasks']}]")]
        except ValueError:
            return
        for task in tasks[:_MOST_FAILURES]:
            self.tasks[task] = RankFailure(
                rank=task,
                node=nodes[0] if len(nodes) == 1 else "",
                exit_code=int(exited[1]) % 256 if exited else 0,
                signal=0 if exited else _SIGNALS.get(how, 0),
                at=at,
                line=one_line(text)[:300],
            )

    def failures(self) -> tuple[RankFailure, ...]:
        for stream in list(self.open):
            self._finish(stream)
        return _merged(self.done, self.ended, self.tasks)


def read_log(
    texts: Iterable[tuple[str, str]], *, cut: bool = False, began: str = ""
) -> TrainingLog:
    """Return what the texts of files, by their names, say of the end of a training.

    Args:
        texts: the name and the text of each file; the job's own output first.
        cut: whether only the end of one was read.
        began: when the script began, `2026-11-22T10:50:00` by the clock of the batch host: what
            an earlier attempt of the job wrote before is left out.
    """
    reading = _Reading()
    sources = []
    at = 0
    for name, text in texts:
        sources.append(name)
        for line in _lines(text):
            at += 1
            earlier = _CANCELLED_AT.search(line) if "CANCELLED AT" in line else None
            if earlier and began and earlier["time"] < began:
                reading = _Reading()
                continue
            reading.line(at, line)
    failures = reading.failures()
    kept = [
        each
        for consequence in (False, True)
        for each in [each for each in failures if each.consequence is consequence][:_KEPT]
    ]
    return TrainingLog(
        failures=tuple(sorted(kept, key=lambda each: each.at)),
        failed=len(failures),
        notes=tuple(dict.fromkeys(reading.notes)),
        sources=tuple(sources),
        cut=cut,
    )


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, without colours; a progress bar's states are lines too."""
    for line in re.split(r"[\r\n]+", text):
        if line:
            short = line[:_LINE_CHARACTERS]
            yield (_ANSI.sub("", short) if "\x1b" in short else short).rstrip()


def _continued(current: _Traceback, text: str) -> bool:
    """Read a line that may belong to a traceback that has begun; tell whether it does."""
    if what := _WHAT.match(text):
        if current.error and not current.inside and "what():" not in current.error:
            current.error = one_line(f"{current.error}: {what['text']}")[:300]
        return True
    if not current.inside:
        if _CHAINED.match(text):
            current.chained = True
        return False
    if frame := _FRAME.match(text):
        if not current.placed:
            _see_frame(current, frame)
        return True
    if text[:1].isspace() or not text:
        return True
    current.inside = False
    current.placed = bool(current.place)
    if _EXCEPTION.match(text) and (not current.error or current.original):
        current.error = one_line(text)[:300]
    current.chained = False
    return True


def _see_frame(current: _Traceback, frame: re.Match[str]) -> None:
    file, function = frame["file"], frame["function"] or ""
    if not any(mark in file for mark in _OF_A_LIBRARY):
        current.place = f"{file.rpartition('/')[2]}:{frame['line']}"
        current.waits_in = ""
    elif function == "_engine_run_backward":
        current.waits_in = "backward"
    elif file.endswith("torch/distributed/distributed_c10d.py") and function not in _NOT_WAITS:
        current.waits_in = current.waits_in or function


def _merged(
    tracebacks: list[_Traceback], ended: list[RankFailure], tasks: dict[int, RankFailure]
) -> tuple[RankFailure, ...]:
    """Return one failure per rank from what its traceback, torchrun and srun say of it."""
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
        else:
            raised[rank] = failure  # a rank that was restarted: its last one counts
    if not raised and unnamed:
        return tuple(_of_unnamed(unnamed, known))
    rest = [_ended(each) for rank, each in known.items() if rank not in raised]
    if by_torchrun:
        rest += [_ended(each) for each in _killed_launchers(tasks)]
    return tuple(sorted([*raised.values(), *rest], key=lambda each: each.at))


def _killed_launchers(tasks: dict[int, RankFailure]) -> list[RankFailure]:
    """Return the tasks that were killed where a task is a torchrun, which then told nothing."""
    return [msgspec.structs.replace(each, rank=None) for each in tasks.values() if each.signal]


def _raised(traceback: _Traceback, rank: int | None, end: RankFailure | None) -> RankFailure:
    who = f"rank {rank}: " if rank is not None else ""
    return RankFailure(
        rank=rank,
        node=end.node if end else "",
        error=traceback.error,
        place=traceback.place,
        waits_in=traceback.waits_in,
        exit_code=end.exit_code if end else 0,
        signal=end.signal if end and end.signal != _SIGNALS["Terminated"] else 0,
        at=traceback.at,
        line=f"{who}{traceback.error}" + (f" ({traceback.place})" if traceback.place else ""),
        consequence=is_consequence(traceback.error),
    )


def _ended(end: RankFailure) -> RankFailure:
    # torchrun and srun end the other ranks with SIGTERM.
    return msgspec.structs.replace(end, consequence=end.signal == _SIGNALS["Terminated"])


def _of_unnamed(
    unnamed: list[RankFailure], known: dict[int | None, RankFailure]
) -> Iterator[RankFailure]:
    """Yield failures whose tracebacks name no rank, with the ranks that can only have been theirs.

    A program may print tracebacks of what it got over, so an exception counts once.
    """
    errors = {each.error: each for each in reversed(unnamed)}
    alike = [rank for rank, end in known.items() if end.exit_code and not end.signal]
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
