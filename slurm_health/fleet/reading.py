# SPDX-License-Identifier: Apache-2.0
"""What the checks of a job say of their nodes, read from the job's journal.

The caller's own journals are read in this process. Those of other users are read by one kind of
child: it becomes the journals' owner before it opens anything, so root is led to nothing that the
owner could not read, and it works with a limit of time and of memory. No link is followed, nothing
is opened that others than its owner could have written, and nothing in a journal is run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_health.fleet.observation import Observation, node_names, observe, shown
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import JobOutcome, Record, RunStarted
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal, private_files
from slurm_health.system.accounts import Accounts
from slurm_health.system.killable import Answered, Broke, become, limit_memory, run_one
from slurm_health.system.proc import mounted_by_users

_log = logging.getLogger(__name__)
# A post-mortem may still add to the journal of a job whose script has ended well.
_SETTLED_S = 24 * 3600.0
# A job that was preempted, requeued or held may wait for so long before it comes back, and a script
# that checks its nodes itself may run for as long before its job is requeued. Chosen.
_COMES_BACK_S = 14 * 24 * 3600.0
# What is not complete after so long never will be: longer than Slurm jobs run.
_ABANDONED_S = 60 * 24 * 3600.0
# Of a job's runs the last ones: no job has as many, and its owner may make any number.
MOST_RUNS = 1000
# What reading other users' jobs may take. A check of 4,096 nodes has some 100 MB.
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 16 << 20
_READ_LIMIT_S = 60.0
_MOST_OF_A_USER_S = 600.0
# So many jobs of a user are read by one child: starting one takes longer than looking at a job.
_AT_ONCE = 100

# From when on a job is final that has been read since it was: it is not looked at again.
SETTLED_S = 0.0
# From when on a job is final that could not be read: it is looked at until it can be.
NEVER_S = 1e15


class KnownJob(NamedTuple):
    """A job, and the stamp that its journal had when it was read last, empty for a new one."""

    cluster: str
    job: str
    stamp: str = ""


class CheckReading(msgspec.Struct, frozen=True, kw_only=True):
    """One check: `label` is its directory's name, `time_s` when it began."""

    label: str
    time_s: float
    nodes: tuple[Observation, ...]


class JobReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's journal says.

    `stamp` changes with the journal; with this stamp the job is final from `final_s` on. `trouble`
    says why a part of it, or all, could not be read.
    """

    uid: int
    stamp: str = ""
    final_s: float = NEVER_S
    checks: tuple[CheckReading, ...] = ()
    trouble: str = ""


class JournalReader:
    """Reads jobs of several users, the jobs of each other user for a limited time.

    A user whose journals take long to read delays the answer by so much, and hides only their own.
    """

    def __init__(self, root: Path, accounts: Accounts | None = None) -> None:
        self._root = root
        self._accounts = accounts or Accounts()
        self._spent_s: dict[int, float] = {}

    def user(self, uid: int) -> int:
        """Return the user that owns an id: one user may have several (subuid(5))."""
        return self._accounts.user(uid)

    def read(
        self, uid: int, jobs: Sequence[KnownJob]
    ) -> Iterator[tuple[KnownJob, JobReading | None]]:
        """Yield what the jobs' journals say that belong to an id; None as `read_job`.

        None also for a job that is left for the next time.
        """
        if uid == os.geteuid():
            for job in jobs:
                yield job, read_job(self._root, job)
            return
        user, at, at_once = self.user(uid), 0, _AT_ONCE
        while at < len(jobs):
            spent_s = self._spent_s.get(user, 0.0)
            if spent_s > _MOST_OF_A_USER_S:
                _log.warning("further journals of user %d are left for the next time", user)
                yield from ((job, None) for job in jobs[at:])
                return
            some = jobs[at : at + at_once]
            began_s = time.monotonic()
            outcome = run_one(
                partial(self._read_as, uid, some), _READ_LIMIT_S, most_bytes=_ANSWER_BYTES
            )
            self._spent_s[user] = spent_s + time.monotonic() - began_s
            readings: list[JobReading | None] = []
            if isinstance(outcome, Answered):
                # Its owner may kill the child while it answers.
                with contextlib.suppress(msgspec.DecodeError):
                    readings = from_msgpack(outcome.data, list[JobReading | None])
            if readings:
                yield from zip(some, readings, strict=False)
                at += len(readings)
            elif len(some) > 1:
                at_once = 1  # one of them is too much: it must not hide the others
            else:
                limit = f": {outcome.reason}" if isinstance(outcome, Broke) else " of time"
                trouble = shown(f"it cannot be read within limits{limit}")
                yield some[0], JobReading(uid=uid, trouble=trouble)
                at += 1

    def _read_as(self, uid: int, jobs: Sequence[KnownJob]) -> bytes:
        """Be the child: become the owner, read jobs until there is enough for one answer."""
        if os.geteuid() == 0:
            become(uid)
        limit_memory(_MEMORY_BYTES)
        began_s, size_bytes = time.monotonic(), 0
        answers = []
        for job in jobs:
            try:
                reading = read_job(self._root, job)
            except Exception as err:  # whatever a user wrote: it must not hide the next job
                why = str(err) or type(err).__name__
                reading = JobReading(uid=uid, trouble=shown(f"it cannot be read: {why}"))
            answers.append(msgspec.msgpack.encode(reading))
            size_bytes += len(answers[-1])
            if size_bytes > _ANSWER_BYTES / 2 or time.monotonic() - began_s > _READ_LIMIT_S / 2:
                break
        return msgspec.msgpack.encode([msgspec.Raw(answer) for answer in answers])


def jobs_below(root: Path, *, owner: int | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the directories of jobs, of all users or of one, each with its cluster.

    What a user has mounted a filesystem on is left out: it answers what that user likes, if at all.

    Raises:
        OSError: the root cannot be read.
    """
    mounted = mounted_by_users(root)
    for cluster in journal.clusters_in(root):
        with (
            contextlib.suppress(PermissionError, FileNotFoundError),
            private_files.directory(root, cluster, owner=owner) as handle,
            private_files.entries(handle) as entries,
        ):
            for entry in entries:
                if (
                    journal.JOURNAL_NAME.fullmatch(entry.name)
                    and f"{cluster}/{entry.name}" not in mounted
                    and entry.is_dir(follow_symlinks=False)
                    and (owner is None or entry.stat(follow_symlinks=False).st_uid == owner)
                ):
                    yield cluster, entry


def read_job(root: Path, known: KnownJob) -> JobReading | None:
    """Read a job's journal; None if it has the stamp that is known, or is being removed.

    A job for which the filesystem gave an error gets no stamp, so it is read again.
    """
    directory = journal.job_directory(root, known.cluster, known.job)
    stamps, newest_s = [], 0.0
    try:
        owner = directory.lstat()
        runs = journal.runs_of(root, known.cluster, known.job)
        for run in runs[-MOST_RUNS:]:
            with journal.opened(run, None) as handle:
                for writer in (journal.MASTER, journal.SUPERVISOR, journal.POST_MORTEM):
                    try:
                        file = os.stat(
                            journal.path_of(run, writer).name, dir_fd=handle, follow_symlinks=False
                        )
                    except FileNotFoundError:
                        continue
                    newest_s = max(newest_s, file.st_mtime)
                    stamps.append(f"{run.name}/{writer}:{file.st_size}")
    except FileNotFoundError:
        return None
    except OSError as err:
        return JobReading(uid=-1, trouble=shown(err.strerror or str(err)))
    # Its length is limited: a job may have a thousand runs.
    stamp = sha256(" ".join(stamps).encode()).hexdigest()
    if stamp == known.stamp:
        return None
    done, troubles, fails = [], [], False
    if len(runs) > MOST_RUNS:
        troubles.append(f"it has more than {MOST_RUNS} runs: earlier ones are not read")
    for run in runs[-MOST_RUNS:]:
        try:
            done.append(_read_run(run))
        except (JournalError, OSError) as err:
            troubles.append(str(err))
            fails |= isinstance(err, OSError) or isinstance(err.__cause__, OSError)
    if any(run.damaged for run in done):
        troubles.append("it has damaged lines, which count nowhere")
    # Of several checks in one attempt another may be over while the script runs.
    latest = max((run.attempt for run in done), default=0)
    open_s = max((run.open_s for run in done if run.attempt == latest), default=_ABANDONED_S)
    return JobReading(
        uid=owner.st_uid,
        stamp="" if fails else stamp,
        final_s=NEVER_S if fails else (newest_s or owner.st_mtime) + open_s,
        checks=tuple(run.check for run in done if run.check is not None),
        trouble=shown("; ".join(troubles)),
    )


class _Run(NamedTuple):
    """A run of a job: its check, None before it began, and how long more may follow."""

    check: CheckReading | None
    attempt: int
    open_s: float
    damaged: bool


def _read_run(run: Path) -> _Run:
    attempt, _ = journal.attempt_and_check(run.name) or (0, 1)
    with journal.opened(run, None) as handle:
        damaged = 0

        def read(writer: str) -> list[Entry]:
            nonlocal damaged
            reader = journal.Reader(run, writer, of_anybody=True)
            entries = reader.take(reader.fetch(handle))
            damaged += reader.damaged
            return entries

        master = read(journal.MASTER)
        begun = next((entry for entry in master if isinstance(entry.record, RunStarted)), None)
        if begun is None or not isinstance(begun.record, RunStarted):
            return _Run(None, attempt, _ABANDONED_S, damaged > 0)
        nodes = {name: _records(read(name)) for name in node_names(begun.record)}
        script, post_mortem = (
            _records(read(writer)) for writer in (journal.SUPERVISOR, journal.POST_MORTEM)
        )
        file = os.stat(journal.path_of(run, journal.MASTER).name, dir_fd=handle)
    check = CheckReading(
        label=run.name,
        # Its owner wrote it: no check begins after the file that says so was written.
        time_s=min(begun.time_s, file.st_mtime),
        nodes=tuple(observe(master, nodes, post_mortem)),
    )
    outcomes = [record for record in _records(master) if isinstance(record, JobOutcome)]
    open_s = _ABANDONED_S
    if outcomes and not outcomes[-1].leaves:
        match [record for record in script if isinstance(record, ScriptStarted | ScriptEnded)][-1:]:
            case [ScriptStarted()]:
                pass
            # A script that ended well because it was told to has a post-mortem.
            case [ScriptEnded(exit_code=0)] if not post_mortem:
                open_s = _SETTLED_S
            case _:
                open_s = _COMES_BACK_S
    return _Run(check, attempt, open_s, damaged > 0)


def _records(entries: Sequence[Entry]) -> list[Record]:
    return [entry.record for entry in entries if entry.record is not None]
