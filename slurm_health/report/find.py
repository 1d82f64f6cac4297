# SPDX-License-Identifier: Apache-2.0
"""Where the journals of a job are, and who owns them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pwd
import re
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import JournalError, RunNotFound, UsageError
from slurm_health.records.text import one_line
from slurm_health.system import journal, private_files
from slurm_health.system.proc import mounted_by_users

_log = logging.getLogger(__name__)

# 12, or 12_3 for task 3 of an array. Slurm's other names (12.batch) are steps.
JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?", re.ASCII)
# Tasks of an array as squeue writes them: 12_[1-4,7] or 12_[1-9:2]; %2 limits how many run at once.
_TASKS = re.compile(r"([0-9]{1,10})_\[([0-9,:-]+)(?:%[0-9]+)?\]", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?", re.ASCII)
_NEAR = 5
_MOST_NAMED = 10_000
_ELSEWHERE = "elsewhere.json"
_ELSEWHERE_BYTES = 1 << 16


def tasks_of(root: Path, job: str, cluster: str | None = None) -> list[str]:
    """Return the tasks with a journal that an array's id, or `12_[1-4]`, stands for, in order.

    A single job has none. Where users share a root, any user can place a link beside a job: links
    of other users make no array of the caller's job.

    Raises:
        UsageError: `job` is neither.
        RunNotFound: no task of `12_[1-4]` has a journal.
        JournalError: the directories cannot be read.
    """
    wanted: list[range] | None = None
    array = job
    if not JOB.fullmatch(job):
        match = _TASKS.fullmatch(job)
        if match is None:
            raise _no_job_id(job)
        array, wanted = match[1], _ranges(match[2])
    numbers: set[int] = set()
    try:
        for name in [cluster] if cluster else journal.clusters_in(root):
            owners: dict[int, int] = {}
            for task in directories(root / name):
                if task.startswith(f"{array}_") and JOB.fullmatch(task):
                    with contextlib.suppress(FileNotFoundError):  # it is being removed
                        uid = (root / name / task).lstat().st_uid
                        owners[int(task.removeprefix(f"{array}_"))] = uid
            if owners:
                users = {*owners.values(), *journal.owners_of(root, name, array)}
                own = os.geteuid() if os.geteuid() in users else None
                numbers |= {number for number, uid in owners.items() if own in {None, uid}}
    except OSError as err:
        if wanted is None:
            return []  # a job can be read where the list of all jobs cannot
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    if wanted is not None:
        numbers = {number for number in numbers if any(number in part for part in wanted)}
        if not numbers:
            raise RunNotFound(job, root, _near(root, array))
    return [f"{array}_{number}" for number in sorted(numbers)]


def tasks_asked_for(job: str) -> tuple[str, frozenset[int] | None]:
    """Return an array's id, and the tasks that `12_[1-4]` names.

    The tasks are None if none is named, or more than one by one can be searched for.
    """
    match = _TASKS.fullmatch(job)
    if not match:
        return job, None
    ranges = _ranges(match[2])
    if sum(map(len, ranges)) > _MOST_NAMED:
        return match[1], None
    return match[1], frozenset(itertools.chain.from_iterable(ranges))


def _ranges(text: str) -> list[range]:
    parts = map(_RANGE.fullmatch, text.split(","))
    return [
        range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1) or 1)
        for part in parts
        if part
    ]


def _no_job_id(job: str) -> UsageError:
    return UsageError(
        f"{job!r} is not a job id: give one like 12, 12_3 for an array's task, or 12_[1-4]"
    )


def runs_of_job(root: Path, job: str, cluster: str | None = None) -> list[Path]:
    """Return the directories of a job's checks, oldest first, at least one.

    Without `cluster`, if several clusters have a job of this id, it is the caller's own, and of
    several own ones the one that ran last. A log line names the choice, and other users who have a
    journal of the id: nothing in a journal proves who had the job.

    Raises:
        UsageError: `job` is no job id, or of several clusters and on none the caller's.
        RunNotFound: there is no journal of it, or only of other clusters' jobs of this id.
        JournalError: the directories cannot be read.
    """
    if not JOB.fullmatch(job):
        raise _no_job_id(job)
    runs: dict[str, list[Path]] = {}
    try:
        refused: OSError | None = None
        for name in journal.clusters_in(root):
            try:
                own_name = journal.name_of(root, name, job, os.geteuid())
                if paths := journal.runs_of(root, name, own_name):
                    runs[name] = paths
            except OSError as err:  # another user's, where several share the root
                if name == cluster:
                    raise
                refused = err
        if refused is not None and not runs:
            raise refused
        if not runs:
            raise RunNotFound(job, root, _near(root, job))
    except OSError as err:
        raise JournalError(root, _why_unreadable(root, job, err)) from err
    clusters = sorted(runs)
    if cluster and cluster not in runs:
        why = f"its cluster there is {' or '.join(clusters)}, not {cluster}"
        why += f": see --cluster={clusters[0]}"
        raise RunNotFound(job, root, reason=why, clusters=clusters)
    if cluster is None:
        # Anyone who may make a directory in a shared root can make the newest of any cluster.
        own = [name for name in runs if owner_of(runs[name][0].parent) == os.geteuid()]
        if not own and len(runs) > 1:
            several = ", ".join(clusters)
            raise UsageError(f"several clusters have a job {job}: name one, --cluster={several}")
        cluster = max(own or runs, key=lambda name: changed_s(runs[name][-1]))
    owner = owner_of(runs[cluster][0].parent)
    if owner != os.geteuid():
        _log.warning("the journal of job %s was written by user %s", job, user_name(owner))
        with contextlib.suppress(OSError):
            for uid in sorted(journal.owners_of(root, cluster, job) - {owner}):
                user = user_name(uid)
                user, sudo = (f"#{uid}", f"'#{uid}'") if user == str(uid) else (user, user)
                text = "user %s has one of job %s too: sudo -u %s slurm-health report %s"
                _log.warning(text, user, job, sudo, job)
    if len(runs) > 1:
        also = ", ".join(name for name in clusters if name != cluster)
        _log.warning(
            "showing job %s of cluster %s; there is one of that id on %s too", job, cluster, also
        )
    return runs[cluster]


def _why_unreadable(root: Path, job: str, err: OSError) -> str:
    """Return why a job's directory cannot be read: often another user's directory or link."""
    others: list[tuple[int, bool]] = []
    mounted = mounted_by_users(root)
    with contextlib.suppress(OSError):
        for cluster in journal.clusters_in(root):
            if f"{cluster}/{job}" not in mounted:
                path = journal.job_directory(root, cluster, job)
                with contextlib.suppress(OSError):
                    uid = path.lstat().st_uid
                    if uid != os.geteuid():
                        others.append((uid, path.is_symlink()))
    if links := [uid for uid, is_link in others if is_link and uid != 0]:
        user = user_name(links[0])
        return (
            f"{job} there was made by user {user}; if the task is not {user}'s, name it by its own"
            f" job id, which `squeue -j {job} -O JobID` prints"
        )
    if others and isinstance(err, PermissionError):
        user = user_name(others[0][0])
        return (
            f"job {job} belongs to user {user}, and only {user} may read its journal:"
            f" ask {user}, or an administrator, for `slurm-health report {job}`"
        )
    return f"cannot be read: {err.strerror or err}"


def owner_of(directory: Path) -> int:
    """Return the owner of a job's directory, which may have been removed meanwhile.

    Raises:
        JournalError: it no longer exists, or its status cannot be read.
    """
    try:
        return directory.lstat().st_uid
    except OSError as err:
        raise JournalError(directory, f"cannot be read: {err.strerror or err}") from err


def user_name(uid: int) -> str:
    """Return a user's name, or the number if the machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def directories(path: Path) -> list[str]:
    """Return what is in a directory, but for plain files: directories, and links of array tasks."""
    mounted = mounted_by_users(path.parent)
    try:
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if f"{path.name}/{entry.name}" not in mounted
                and not entry.is_file(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _near(root: Path, job: str) -> list[str]:
    """Return jobs that may have been meant: tasks of this array, else the newest ones."""
    jobs = [
        root / cluster / name
        for cluster in journal.clusters_in(root)
        for name in directories(root / cluster)
        if JOB.fullmatch(name)
    ]
    tasks = [path for path in jobs if path.name.startswith(f"{job}_")]
    newest = sorted(tasks or jobs, key=changed_s, reverse=True)
    return list(dict.fromkeys(path.name for path in newest))[:_NEAR]


def changed_s(directory: Path) -> float:
    """Return when a run, or a job's list of runs, was last written to."""
    for path in (journal.path_of(directory, journal.MASTER), directory):
        with contextlib.suppress(OSError):  # it does not exist, or is closed to the caller
            return path.lstat().st_mtime
    return 0.0


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that has a job's journal, and the directory there.

    The nodes of a `slurm-health run` without a shared directory leave the journal to node 0; the
    others note beside their own journals where it is.
    """

    host: str
    directory: str


def note_elsewhere(root: Path, cluster: str, job: int, elsewhere: Elsewhere) -> None:
    """Write down where a job's journal is; without effect if that cannot be written."""
    data = msgspec.json.encode(elsewhere) + b"\n"
    with (
        contextlib.suppress(OSError),
        private_files.directory(root, cluster, str(job), owner=os.geteuid(), make=True) as handle,
        private_files.opened(handle, _ELSEWHERE, os.O_WRONLY | os.O_TRUNC, make=True) as file,
    ):
        os.write(file, data)


def elsewhere_text(root: Path, job: str) -> str:
    """Return where a job's journal is, by a note of the caller's own; empty without one."""
    with contextlib.suppress(OSError):
        for cluster in sorted(journal.clusters_in(root)):
            with (
                contextlib.suppress(OSError, ValueError),
                private_files.directory(root, cluster, job, owner=os.geteuid()) as handle,
            ):
                data = private_files.read(handle, _ELSEWHERE, most_bytes=_ELSEWHERE_BYTES)
                note = from_json(data, Elsewhere)
                host, directory = one_line(note.host), one_line(note.directory)
                return f"it is on {host}, in {directory}: run slurm-health report {job} there."
    return ""
