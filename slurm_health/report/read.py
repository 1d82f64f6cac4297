# SPDX-License-Identifier: Apache-2.0
"""The entries of a run's files, and what of them cannot be read.

A report names what is missing: files that are gone or closed, lines that are damaged or of a newer
slurm-health. Runs below one id may belong to several jobs: Slurm starts its numbers anew after a
reset of its state. Root reads another user's journal in a child with limits of time and memory.
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
_READ_LIMIT_S = 60.0
# A check of 4,096 nodes over 100 rounds has some 100 MB, and takes 24 times that to be read.
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 128 << 20
_REASON_CHARACTERS = 160

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
        cluster: the cluster whose job it is; None for any.
        now_s: the time, to tell a running check from one whose master died.

    Of several jobs that had this id it is the last one; a log line names the one before.

    Raises:
        UsageError: `job` is no job id.
        RunNotFound: there is no journal of it.
        JournalError: a journal cannot be read, is another user's, or a newer slurm-health wrote
            all of it.
    """
    runs = runs_of_job(root, job, cluster)

    def load_last() -> _LastJob:
        jobs = jobs_in([read_run(path) for path in runs])
        return _LastJob(
            earlier=len(jobs) > 1,
            before_s=began_s(jobs[-2][0]) if len(jobs) > 1 else None,
            story=story_of(jobs[-1], now_s=now_s),
        )

    last = guarded(runs[0].parent, load_last, _LastJob)
    if last.earlier:
        begun = moment_text(last.before_s)
        _log.warning("an earlier job had the id %s too, on %s; this is the last one", job, begun)
    return last.story


class _LastJob(msgspec.Struct, frozen=True, kw_only=True):
    """The last job that had an id; whether one had it before, and when the one before began."""

    earlier: bool
    before_s: float | None
    story: Story


def read_run(directory: Path, *, of_nodes: bool = True) -> RunEntries:
    """Return the entries of all files of one check, and what of them cannot be read.

    Args:
        directory: the run's.
        of_nodes: also read the measurements: one file per node.

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
            started = _start(master)
            names = started.nodes if started and of_nodes else []
            # The master creates the nodes' files after its first record.
            begun = len(master) > 1
            # A task of an array: its record and a link of the owner's must agree. Where users share
            # a root, a job could pass itself off as a task of any other's array.
            job, task = directory.parent, started.array if started else ""
            is_task = _TASK.fullmatch(task) is not None
            if not is_task or journal.linked_to(job.parents[1], job.parent.name, task) != job.name:
                task = ""
            return RunEntries(
                label=directory.name,
                job=job.name,
                cluster=job.parent.name,
                task=task,
                master=master,
                nodes={
                    name: files.entries_of_node(name, expected=begun)
                    for name in names
                    if _NODE.fullmatch(name)
                },
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
        """Return the entries of one writer, none if there is no file.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            data = private_files.read(self._run, f"{writer}.jsonl")
        except FileNotFoundError:
            return []
        entries = []
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            try:
                entries.append(decode(line))
            except NewerVersion as err:
                self.newer.add(err.version)
                self._note(f"lines of a newer slurm-health (version {err.version})", writer)
            except ValueError:
                self._note("damaged lines", writer)
        return entries

    def entries_of_node(self, node: str, *, expected: bool) -> list[Entry]:
        """Return the entries of a node, none if its file does not exist or cannot be read."""
        try:
            entries = self.entries(node)
            if expected and not entries:
                self.expect(node)
        except OSError as err:
            self._note(f"cannot be read: {err.strerror or err}", node)
            return []
        return entries

    def expect(self, writer: str) -> None:
        """Note a writer without a file."""
        try:
            with private_files.opened(self._run, f"{writer}.jsonl"):
                pass
        except FileNotFoundError:
            self._note("no file", writer)

    def missing(self) -> tuple[str, ...]:
        """Return what is missing, one sentence for all writers that lack the same."""
        return tuple(
            f"{fold(writers)}: {what}"
            + (f", left out: {writers.total()}" if "lines" in what else "")
            for what, writers in self._lacks.items()
        )

    def _note(self, what: str, writer: str) -> None:
        self._lacks.setdefault(what, Counter())[writer] += 1


def jobs_in(runs: Sequence[RunEntries]) -> list[list[RunEntries]]:
    """Return the runs below one job id by job, the oldest job first, at least one.

    A run without a start belongs to the job before it.
    """
    jobs: list[list[RunEntries]] = []
    for run in sorted(runs, key=began_s):
        start = _start(run.master)
        before = _start(jobs[-1][-1].master) if jobs else None
        if not jobs or (start and before and is_of_another_job(before, start)):
            jobs.append([run])
        else:
            jobs[-1].append(run)

    def place(run: RunEntries) -> tuple[int, int]:
        return journal.attempt_and_check(run.label) or (0, 1)

    return [sorted(job, key=place) for job in jobs] or [[]]


def began_s(run: RunEntries) -> float:
    """Return when a run began; one without a record is the newest."""
    return run.master[0].time_s if run.master else float("inf")


def _start(master: Sequence[Entry]) -> RunStarted | None:
    return next((e.record for e in master if isinstance(e.record, RunStarted)), None)


class NotRead(Exception):
    """It was not read within limits. The text gives the reason."""


class _Refused(msgspec.Struct, frozen=True):
    """A JournalError, as it leaves the child."""

    path: str
    text: str


def guarded(directory: Path, work: Callable[[], T], kind: type[T]) -> T:
    """Return what `work` makes of a job's directory: in a child if it is another user's.

    Raises:
        JournalError: it cannot be read, or not within limits.
    """
    if owner_of(directory) == os.geteuid():
        return work()

    def encoded() -> bytes:
        try:
            return b"+" + msgspec.msgpack.encode(work())
        except JournalError as err:
            return b"-" + msgspec.msgpack.encode(_Refused(str(err.path), str(err)))

    try:
        answer = within_limits(encoded, limit_s=_READ_LIMIT_S, memory_bytes=_MEMORY_BYTES)
    except NotRead as err:
        raise JournalError(directory, f"is another user's, and not read: {err}") from None
    if answer[:1] == b"+":
        return from_msgpack(answer[1:], kind)
    refused = from_msgpack(answer[1:], _Refused)
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
            raise NotRead(cut(one_line(reason), _REASON_CHARACTERS))
        case Hung():
            raise NotRead(f"not within {limit_s:.0f} s")
