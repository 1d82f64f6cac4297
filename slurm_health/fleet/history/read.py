# SPDX-License-Identifier: Apache-2.0
"""What the checks of one job say of their nodes, from the job's journal. Reads files only.

Journals of other users are read as `report` reads them: no link is followed, nothing is opened that
its owner has not alone, and nothing in them is run.

What other users' journals say is looked at and read in a child with limits. Who fills theirs with
what takes long to read is left alone after a while, until the next time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import median

import msgspec

from slurm_health.fleet.standing.observation import (
    MOST_VALUE,
    NEVER_S,
    NODE_NAME,
    UNCHANGED,
    CheckFigure,
    CheckSeen,
    JobSeen,
    observations,
    shown,
    unread,
    without_job_end,
)
from slurm_health.preflight.session.measurement import figures_of
from slurm_health.records.decoding import from_msgpack
from slurm_health.records.errors import JournalError
from slurm_health.records.probe_catalog import unit_of
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import JobOutcome, Record, RunStarted, Sampled, VerdictReached
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.records.text import cut, one_line
from slurm_health.system import journal
from slurm_health.system.accounts import Accounts
from slurm_health.system.killable import Answered, Broke, Hung, WorkResult, limit_memory, run_one

_log = logging.getLogger(__name__)
# A post-mortem may still add to the journal of a job whose script has ended well.
_SETTLED_S = 24 * 3600.0
# A job that was preempted, requeued or held may wait for so long before it comes back, and a script
# that checks its nodes itself may run for as long before its job is requeued. Chosen.
_COMES_BACK_S = 14 * 24 * 3600.0
# What is not complete after so long never will be: longer than Slurm jobs run.
_ABANDONED_S = 60 * 24 * 3600.0
_MOST_NODES = 64 * 1024  # as Slurm's node lists
_MOST_SAID = 500
# Of a job's runs the last ones: no job has as many, and its owner may make any number.
MOST_RUNS = 1000
# What reading one job of another user may take. A check of 4,096 nodes has some 100 MB.
_MOST_BYTES = 512 << 20
_MEMORY_BYTES = 4 << 30
_ANSWER_BYTES = 16 << 20
_READ_LIMIT_S = 60.0
_MOST_OF_A_USER_S = 600.0
# So many jobs of a user are looked at by one child: starting one takes longer than looking.
_AT_ONCE = 100
_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class _Run:
    check: CheckSeen | None
    attempt: int
    open_s: float = _ABANDONED_S  # after what was written last, more may follow for so long
    damaged: bool = False


def stamp_of(root: Path, cluster: str, job: str) -> str:
    """Return what changes with a job's journal.

    Raises:
        OSError: it cannot be read, or is refused.
    """
    return _stamp_and_time(root, cluster, job)[0]


def _stamp_and_time(root: Path, cluster: str, job: str) -> tuple[str, float]:
    """Return what changes with a job's journal, and when that was written last.

    Raises:
        OSError: it cannot be read, or is refused.
    """
    parts, newest_s = [], 0.0
    for directory in journal.runs_of(root, cluster, job)[-MOST_RUNS:]:
        with journal.opened(directory, None) as run:
            for writer in (journal.MASTER, journal.SUPERVISOR, journal.POST_MORTEM):
                name = journal.path_of(directory, writer).name
                try:
                    found = os.stat(name, dir_fd=run, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                newest_s = max(newest_s, found.st_mtime)
                parts.append(f"{directory.name}/{writer}:{found.st_size}")
    # Its length is limited: a job may have a thousand runs, and what keeps it holds 64 kB.
    return sha256(" ".join(parts).encode()).hexdigest(), newest_s


def read_job(root: Path, cluster: str, job: str, *, most_bytes: int | None = None) -> JobSeen:
    """Return what the checks of a job say of their nodes.

    With `most_bytes` no more than that is read of all its runs together. Where the filesystem gave
    an error for one of them, the job is to be read again: what changes with it has not.

    Raises:
        OSError: the job's directory cannot be read, or is refused.
    """
    stamp, newest_s = _stamp_and_time(root, cluster, job)
    found = journal.job_directory(root, cluster, job).lstat()
    newest_s = newest_s or found.st_mtime  # one whose first check is just being made
    runs, troubles, passing = [], [], False
    budget = _Budget(journal.job_directory(root, cluster, job), most_bytes)
    listed = journal.runs_of(root, cluster, job)
    if len(listed) > MOST_RUNS:
        troubles.append(f"it has more than {MOST_RUNS} runs: earlier ones are not read")
    for directory in listed[-MOST_RUNS:]:
        try:
            runs.append(_read_run(directory, budget))
        except (JournalError, OSError) as err:
            troubles.append(str(err))
            passing |= isinstance(err, OSError) or isinstance(err.__cause__, OSError)
    if any(run.damaged for run in runs):
        troubles.append("it has damaged lines, which count nowhere")
    # Of several checks in one attempt another may be over while the script runs.
    latest = max((run.attempt for run in runs), default=0)
    open_s = max((run.open_s for run in runs if run.attempt == latest), default=_ABANDONED_S)
    return JobSeen(
        uid=found.st_uid,
        stamp="" if passing else stamp,
        final_s=NEVER_S if passing else newest_s + open_s,
        checks=tuple(run.check for run in runs if run.check),
        trouble=cut(one_line("; ".join(troubles)), _MOST_SAID),
    )


class _Budget:
    """How many bytes of a job may be read still, None for all."""

    def __init__(self, of: Path, most_bytes: int | None) -> None:
        self._of = of
        self._most_bytes = self._left_bytes = most_bytes

    def spend(self, data: bytes) -> bytes:
        """Return the data, if there is room for it.

        Raises:
            JournalError: there is none.
        """
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise JournalError(self._of, f"it has more than {self._most_bytes} bytes")
        return data


def _read_run(directory: Path, budget: _Budget) -> _Run:
    attempt, _ = journal.attempt_and_check(directory.name) or (0, 1)
    with journal.opened(directory, None) as run:
        damaged = 0

        def read(writer: str) -> list[Entry]:
            nonlocal damaged
            reader = journal.Reader(directory, writer, of_anybody=True)
            found = reader.take(budget.spend(reader.fetch(run)))
            damaged += reader.damaged
            return found

        master = read(journal.MASTER)
        start = next((each for each in master if isinstance(each.record, RunStarted)), None)
        if start is None or not isinstance(start.record, RunStarted):
            return _Run(check=None, attempt=attempt, damaged=damaged > 0)
        records = _records(master)
        listed = dict.fromkeys(start.record.nodes[:_MOST_NODES])
        names = [name for name in listed if NODE_NAME.fullmatch(name)]
        nodes = {name: _records(read(name)) for name in names}
        script = _records(read(journal.SUPERVISOR))
        post_mortem = _records(read(journal.POST_MORTEM))
        written_s = os.stat(journal.path_of(directory, journal.MASTER).name, dir_fd=run).st_mtime
        seen = observations(
            without_job_end(master),
            nodes,
            post_mortem,
            _figures(records, nodes.values()),
        )
    # Its owner wrote it: no check begins after what is said of it was written.
    began_s = min(start.time_s, written_s)
    check = CheckSeen(
        label=directory.name,
        time_s=began_s,
        seen=tuple(seen),
    )
    open_s = _open_s(records, script, post_mortem)
    return _Run(check=check, attempt=attempt, open_s=open_s, damaged=damaged > 0)


def _figures(
    master: Sequence[Record], nodes: Iterable[Sequence[Record]]
) -> dict[str, list[CheckFigure]]:
    """Return what `report` shows of each node, of each figure the median.

    Of the several groups that a node was in, that tells about the node and not about a partner.
    """
    samples = [each for own in nodes for each in own if isinstance(each, Sampled)]
    verdicts = [each for each in master if isinstance(each, VerdictReached)]
    by_node = figures_of(samples, verdicts[-1] if verdicts else None).by_node
    return {
        node: [
            CheckFigure("", shown(f"{probe} {unit_of(probe)}"), median(kept))
            for probe, values in figures.items()
            if (kept := [value for value in values if value < MOST_VALUE])
        ]
        for node, figures in by_node.items()
    }


def _open_s(
    master: Sequence[Record], script: Sequence[Record], post_mortem: Sequence[Record]
) -> float:
    """Return for how long something may follow what was written last.

    A script that ended well because it was told to has a post-mortem.
    """
    finished = [each for each in master if isinstance(each, JobOutcome)]
    if not finished or finished[-1].leaves:
        return _ABANDONED_S
    match [each for each in script if isinstance(each, ScriptStarted | ScriptEnded)][-1:]:
        case [ScriptStarted()]:
            return _ABANDONED_S
        case [ScriptEnded(exit_code=0)] if not post_mortem:
            return _SETTLED_S
    return _COMES_BACK_S


def _records(entries: Sequence[Entry]) -> list[Record]:
    return [each.record for each in entries if each.record is not None]


class _Look(msgspec.Struct, frozen=True):
    """What changes with a job's journal; or why it is not known, empty for one that is gone."""

    stamp: str | None = None
    trouble: str = ""


class Others:
    """Reads the journals of other users, and of each user for so long and no longer.

    Args:
        root: the directory of all journals.
        owners: whose those are that may have changed, by cluster and id, in the order in which they
            are read.
        accounts: whose ids are.
    """

    def __init__(
        self,
        root: Path,
        owners: Mapping[tuple[str, str], int] | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self._root = root
        self._accounts = accounts or Accounts()
        self._of_user: dict[int, list[tuple[str, str]]] = {}
        for job, uid in (owners or {}).items():
            self._of_user.setdefault(self._accounts.user(uid), []).append(job)
        self._looks: dict[tuple[str, str], _Look] = {}
        self._spent_s: dict[int, float] = {}

    def read_if_changed(
        self, uid: int, cluster: str, job: str, stamp: str | None
    ) -> JobSeen | None:
        """Return what a job of a user says, `UNCHANGED` for that; None where it is not known."""
        look = self._look(uid, cluster, job)
        if look.trouble:
            return unread(look.trouble, uid=uid)
        if look.stamp is None or look.stamp == stamp:
            return None if look.stamp is None else UNCHANGED
        return self.read(uid, look.stamp, lambda: self._read_job(uid, cluster, job))

    def read(self, uid: int, stamp: str, work: Callable[[], JobSeen]) -> JobSeen | None:
        """Return what a job of a user says, and why not where it cannot be read within limits."""
        match self._limited(uid, lambda: msgspec.msgpack.encode(work())):
            case Answered(data=data):
                return from_msgpack(data, JobSeen)
            case Broke(reason=reason):
                why = f"it cannot be read within limits: {cut(one_line(reason), _SHOWN)}"
            case Hung(limit_s=limit_s):
                stamp, why = "", f"it cannot be read within {limit_s:g} s"
            case None:
                return None
        # What broke is not tried again before its stamp changes.
        return unread(why, uid=uid, stamp=stamp)

    def _read_job(self, uid: int, cluster: str, job: str) -> JobSeen:
        try:
            return read_job(self._root, cluster, job, most_bytes=_MOST_BYTES)
        except OSError as err:
            return unread(err.strerror or str(err), uid=uid)

    def _look(self, uid: int, cluster: str, job: str) -> _Look:
        """Return what changes with a job's journal, which is looked at with the user's next ones.

        A run has a directory and files: of many thousands even that takes long.
        """
        if (cluster, job) not in self._looks:
            some = self._next_of(uid, (cluster, job))
            outcome = self._limited(uid, lambda: msgspec.msgpack.encode(self._looked(some)))
            looks = [_Look()] * len(some)
            if isinstance(outcome, Answered):
                looks = from_msgpack(outcome.data, list[_Look])
            elif outcome is not None:
                _log.warning("%d jobs of user %d cannot be looked at within limits", len(some), uid)
            self._looks.update(zip(some, looks, strict=True))
        return self._looks.pop((cluster, job))

    def _next_of(self, uid: int, first: tuple[str, str]) -> list[tuple[str, str]]:
        """Take the next jobs of a user, beginning with this one."""
        uid = self._accounts.user(uid)
        theirs = self._of_user.get(uid, [])
        at = theirs.index(first) if first in theirs else len(theirs)
        some, self._of_user[uid] = theirs[at : at + _AT_ONCE], theirs[at + _AT_ONCE :]
        return some or [first]

    def _looked(self, jobs: Sequence[tuple[str, str]]) -> list[_Look]:

        found = []
        for cluster, job in jobs:
            try:
                found.append(_Look(stamp=stamp_of(self._root, cluster, job)))
            except FileNotFoundError:
                found.append(_Look())  # it is being removed
            except OSError as err:  # closed to this user, where several share the root
                found.append(_Look(trouble=err.strerror or str(err)))
        return found

    def _limited(self, uid: int, work: Callable[[], bytes]) -> WorkResult | None:
        """Work on what a user wrote, in a child; None where theirs has taken too long already."""
        uid = self._accounts.user(uid)
        spent_s = self._spent_s.get(uid, 0.0)
        if spent_s > _MOST_OF_A_USER_S:
            return None

        def limited() -> bytes:
            limit_memory(_MEMORY_BYTES)
            return work()

        began_s = time.monotonic()
        outcome = run_one(limited, _READ_LIMIT_S, most_bytes=_ANSWER_BYTES)
        self._spent_s[uid] = spent_s = spent_s + time.monotonic() - began_s
        if spent_s > _MOST_OF_A_USER_S:
            _log.warning("further journals of user %d are left for the next time", uid)
        return outcome
