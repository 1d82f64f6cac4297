# SPDX-License-Identifier: Apache-2.0
"""What one run left behind: the entries of its files, and what of them cannot be read.

A report shows what is there and says what is missing: a file that is gone or closed, lines that are
damaged, lines of a newer slurm-health. Runs below one id may be those of several jobs: Slurm counts
anew after a reset of its state. What root reads of another user's journal is read in a child: its
memory and time have limits.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from slurm_health.records.allocation import is_of_another_job
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError, RecordTooNew
from slurm_health.records.nodeset import fold
from slurm_health.records.record_codec import VERSION, Entry, NewerVersion, decode
from slurm_health.records.records import RunStarted
from slurm_health.records.text import cut, one_line
from slurm_health.report.build import story_of
from slurm_health.report.find import owner_of, runs_of_job
from slurm_health.report.layout import moment_text
from slurm_health.report.story import RunEntries, Story
from slurm_health.system import journal, private_files
from slurm_health.system.killable import Answered, Broke, Hung, limit_memory, run_one

# A node's name becomes a file's name. Anything else in a journal did not come from Slurm.
_NODE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}", re.ASCII)
_NO_FILE = "no file"
_READ_LIMIT_S = 60.0
# A check of 4,096 nodes over 100 rounds has some 100 MB, and takes 24 times that to be read.
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 128 << 20
_MOST_SAID = 160

T = TypeVar("T")

_log = logging.getLogger(__name__)


def load(
    root: Path,
    job: str,
    *,
    cluster: str | None = None,
    now_s: float | None = None,
) -> Story:
    """Return what is known of a job.

    Args:
        root: the directory of all journals.
        job: a job id, or `12_3` for a task of an array.
        cluster: the cluster whose job it is; None for the one that is found.
        now_s: the time, to tell a check that runs from one whose master died.

    Of several jobs that had this id it is the last one; a log line names the one before.

    Raises:
        UsageError: `job` is no job id.
        RunNotFound: there is no journal of it.
        JournalError: a journal cannot be read, is another user's, or a newer slurm-health wrote
            all of it.
    """
    runs = runs_of_job(root, job, cluster)
    found = guarded(runs[0].parent, lambda: _loaded(runs, now_s), _Loaded)
    if found.earlier:
        begun = moment_text(found.before_s)
        _log.warning("an earlier job had the id %s too, on %s; this is the last one", job, begun)
    return found.report


class _Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The last job that had an id; whether one had it before, and when the one before began."""

    earlier: bool
    before_s: float | None
    report: Story


def _loaded(runs: Sequence[Path], now_s: float | None) -> _Loaded:
    jobs = jobs_in([read_run(path) for path in runs])
    return _Loaded(
        earlier=len(jobs) > 1,
        before_s=began_s(jobs[-2][0]) if len(jobs) > 1 else None,
        report=story_of(jobs[-1], now_s=now_s),
    )


def read_run(directory: Path, *, of_nodes: bool = True) -> RunEntries:
    """Return everything one check left behind, and what of it cannot be read.

    Args:
        directory: the run's.
        of_nodes: also what was measured on the nodes: a file for each of them.

    Raises:
        JournalError: the master's file cannot be read, or a newer slurm-health wrote all of it
            (RecordTooNew).
    """
    try:
        with journal.opened(directory, None) as run:
            files = _Files(run)
            master = files.entries(journal.MASTER)
            if not master and files.newer:
                raise RecordTooNew(
                    journal.path_of(directory, journal.MASTER), max(files.newer), VERSION
                )
            if not master:
                files.expect(journal.MASTER)
            nodes = _nodes(master) if of_nodes else []
            # The master makes the nodes' files once it has said who they are.
            begun = len(master) > 1
            return RunEntries(
                label=directory.name,
                job=directory.parent.name,
                cluster=directory.parent.parent.name,
                task=_task(directory.parent, master),
                master=master,
                nodes={node: files.entries_of_node(node, expected=begun) for node in nodes},
                supervisor=files.entries(journal.SUPERVISOR),
                requeue=files.entries(journal.REQUEUE),
                post_mortem=files.entries(journal.POST_MORTEM),
                restart=files.entries(journal.RESTART),
                monitor=files.entries(journal.MONITOR),
                missing=files.missing(),
            )
    except OSError as err:
        raise journal.unusable(directory, "read", err) from err


class _Files:
    """Reads the files of one run, whose directory is held open, and notes what they lack."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._lacks: dict[str, Counter[str]] = {}
        self.newer: set[int] = set()

    def entries(self, writer: str) -> list[Entry]:
        """Return the entries of one writer, none where there is no file.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            data = private_files.read(self._run, f"{writer}.jsonl")
        except FileNotFoundError:
            return []
        found = []
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            try:
                found.append(decode(line))
            except NewerVersion as err:
                self.newer.add(err.version)
                self._note(f"lines of a newer slurm-health (version {err.version})", writer)
            except ValueError:
                self._note("damaged lines", writer)
        return found

    def entries_of_node(self, node: str, *, expected: bool) -> list[Entry]:
        """Return the entries of a node, none where its file is not there or cannot be read."""
        try:
            found = self.entries(node)
            if expected and not found:
                self.expect(node)
        except OSError as err:
            self._note(f"cannot be read: {err.strerror or err}", node)
            return []
        return found

    def expect(self, writer: str) -> None:
        """Note it where a writer has no file."""
        if not self._has_file(writer):
            self._note(_NO_FILE, writer)

    def missing(self) -> tuple[str, ...]:
        """Return what is lacking, a sentence for all writers that lack the same."""
        return tuple(
            f"{fold(writers)}: {what}"
            + (f", left out: {writers.total()}" if "lines" in what else "")
            for what, writers in self._lacks.items()
        )

    def _note(self, what: str, writer: str) -> None:
        self._lacks.setdefault(what, Counter())[writer] += 1

    def _has_file(self, writer: str) -> bool:
        try:
            with private_files.opened(self._run, f"{writer}.jsonl"):
                return True
        except FileNotFoundError:
            return False


def _task(job: Path, master: list[Entry]) -> str:
    """Return which task of an array a job is: its owner's word, and a link that only they can lay.

    Where users share a root, a job could pass itself off as a task of any other's array.
    """
    started = [entry.record for entry in master if isinstance(entry.record, RunStarted)]
    task = started[0].array if started else ""
    known = _TASK.fullmatch(task)
    return (
        task
        if known and journal.linked_to(job.parents[1], job.parent.name, task) == job.name
        else ""
    )


def _nodes(master: list[Entry]) -> list[str]:
    started = [entry.record for entry in master if isinstance(entry.record, RunStarted)]
    return [node for node in (started[0].nodes if started else []) if _NODE.fullmatch(node)]


def jobs_in(runs: Sequence[RunEntries]) -> list[list[RunEntries]]:
    """Return the runs below one job id as those of each job, the oldest job first, at least one.

    A run that nothing is known of belongs to the job before it.
    """
    jobs: list[list[RunEntries]] = []
    for run in sorted(runs, key=began_s):
        if jobs and not _is_another(jobs[-1][-1], run):
            jobs[-1].append(run)
        else:
            jobs.append([run])
    return [sorted(job, key=_place) for job in jobs] or [[]]


def began_s(run: RunEntries) -> float:
    """Return when a run began; one that nothing is known of is the newest."""
    return run.master[0].time_s if run.master else float("inf")


def _is_another(before: RunEntries, run: RunEntries) -> bool:
    """Tell whether a run belongs to another job than the run before it."""
    old, new = _start(before), _start(run)
    return old is not None and new is not None and is_of_another_job(old, new)


def _start(run: RunEntries) -> RunStarted | None:
    found = (e.record for e in run.master if isinstance(e.record, RunStarted))
    return next(found, None)


def _place(run: RunEntries) -> tuple[int, int]:
    return journal.attempt_and_check(run.label) or (0, 1)


class NotRead(Exception):
    """It was not read within limits. The text says why."""


class _Refused(msgspec.Struct, frozen=True):
    """A JournalError, as it leaves the child."""

    path: str
    text: str


def guarded(directory: Path, work: Callable[[], T], kind: type[T]) -> T:
    """Return what `work` makes of a job's directory: in a child where that is another user's.

    Raises:
        JournalError: it cannot be read, or not within limits.
    """
    if owner_of(directory) == os.geteuid():
        return work()

    def told() -> bytes:
        try:
            return b"+" + msgspec.msgpack.encode(work())
        except JournalError as err:
            return b"-" + msgspec.msgpack.encode(_Refused(str(err.path), str(err)))

    try:
        said = within_limits(told, limit_s=_READ_LIMIT_S, memory_bytes=_MEMORY_BYTES)
    except NotRead as err:
        raise JournalError(directory, f"is another user's, and not read: {err}") from None
    if said[:1] == b"+":
        return from_msgpack(said[1:], kind)
    refused = from_msgpack(said[1:], _Refused)
    raise JournalError(Path(refused.path), refused.text.removeprefix(f"journal {refused.path}: "))


def within_limits(
    work: Callable[[], bytes],
    *,
    limit_s: float,
    memory_bytes: int,
    most_bytes: int = _ANSWER_BYTES,
) -> bytes:
    """Return what `work` answers in a child.

    Raises:
        NotRead: it does not answer within limits.
    """

    def limited() -> bytes:
        limit_memory(memory_bytes)
        try:
            return work()
        except MemoryError:
            raise MemoryError(f"it takes more than {memory_bytes >> 30} GiB of memory") from None

    match run_one(limited, limit_s, most_bytes=most_bytes):
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise NotRead(cut(one_line(reason), _MOST_SAID))
        case Hung():
            raise NotRead(f"not within {limit_s:.0f} s")
