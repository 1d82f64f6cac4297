# SPDX-License-Identifier: Apache-2.0
"""Where the journals of a job are, and whose."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pwd
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.errors import JournalError, RunNotFound, UsageError
from slurm_health.records.text import one_line
from slurm_health.system import journal, private_files
from slurm_health.system.proc import mounted_by_users

_log = logging.getLogger(__name__)

# 12, or 12_3 for task 3 of an array. What Slurm prints beside that (12.batch) is a step.
JOB = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?", re.ASCII)
# Tasks of an array as squeue writes them: 12_[1-4,7] or 12_[1-9:2], with %2 for how many may run at
# once.
_TASKS = re.compile(r"([0-9]{1,10})_\[([0-9,:-]+)(?:%[0-9]+)?\]", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?", re.ASCII)
_NEAR = 5
_MOST_NAMED = 10_000
# Says where the journal is that another machine has.
_ELSEWHERE = "elsewhere.json"
_ELSEWHERE_BYTES = 1 << 16


def tasks_of(root: Path, job: str, cluster: str | None = None) -> list[str]:
    """Return the tasks with a journal that an array's id, or `12_[1-4]`, stands for, in order.

    Nothing where `job` is one job.

    Raises:
        UsageError: `job` is neither.
        RunNotFound: no task of `12_[1-4]` has a journal.
        JournalError: the directories cannot be read.
    """
    if JOB.fullmatch(job):
        array, wanted = job, None
    elif found := _TASKS.fullmatch(job):
        array, wanted = found[1], _ranges(found[2])
    else:
        raise _no_job_id(job)
    try:
        numbers = _task_numbers(root, array, [cluster] if cluster else journal.clusters_in(root))
    except OSError as err:
        if wanted is None:
            return []  # a job can be read where the list of all jobs cannot
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    if wanted is not None:
        numbers = {n for n in numbers if any(n in each for each in wanted)}
        if not numbers:
            raise RunNotFound(job, root, _near(root, array))
    return [f"{array}_{number}" for number in sorted(numbers)]


def tasks_asked_for(job: str) -> tuple[str, frozenset[int] | None]:
    """Return an array's id, and the tasks that `12_[1-4]` names.

    None where it names none, or more than are looked for one by one.
    """
    found = _TASKS.fullmatch(job)
    if not found:
        return job, None
    ranges = _ranges(found[2])
    if sum(map(len, ranges)) > _MOST_NAMED:
        return found[1], None
    return found[1], frozenset(itertools.chain.from_iterable(ranges))


def _task_numbers(root: Path, array: str, clusters: Iterable[str]) -> set[int]:
    """Return the numbers of an array's tasks that have a journal.

    Where users share a root, any user can lay a link beside a job: it makes no array of one's own.
    """
    numbers: set[int] = set()
    for cluster in clusters:
        owners: dict[int, int] = {}
        for name in directories(root / cluster):
            if name.startswith(f"{array}_") and JOB.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # it is being removed
                    uid = (root / cluster / name).lstat().st_uid
                    owners[int(name.removeprefix(f"{array}_"))] = uid
        if owners:
            known = {*owners.values(), *journal.owners_of(root, cluster, array)}
            own = os.geteuid() if os.geteuid() in known else None
            numbers |= {number for number, uid in owners.items() if own in {None, uid}}
    return numbers


def _ranges(text: str) -> list[range]:
    found = [_RANGE.fullmatch(part) for part in text.split(",")]
    return [
        range(int(part[1]), int(part[2] or part[1]) + 1, int(part[3] or 1) or 1)
        for part in found
        if part
    ]


def _no_job_id(job: str) -> UsageError:
    return UsageError(
        f"{job!r} is not a job id: give one like 12, 12_3 for an array's task, or 12_[1-4]"
    )


def runs_of_job(root: Path, job: str, cluster: str | None = None) -> list[Path]:
    """Return the directories of a job's checks, oldest first, at least one.

    It is that of `cluster`. Where none is named and several clusters have a job of this id, it is
    the caller's own, of several the one that ran last; a log line says which.

    Raises:
        UsageError: `job` is no job id, or of several clusters and on none the caller's.
        RunNotFound: there is no journal of it, or only of other clusters' jobs of this id.
        JournalError: the directories cannot be read.
    """
    if not JOB.fullmatch(job):
        raise _no_job_id(job)
    try:
        found = _runs_by_cluster(root, job, cluster)
        if not found:
            raise RunNotFound(job, root, _near(root, job))
    except OSError as err:
        owner = _another_owner(root, job)
        layer = _who_laid(root, job)
        if layer is not None:
            raise JournalError(root, _own_id(job, layer)) from err
        if owner is not None and isinstance(err, PermissionError):
            raise JournalError(root, _ask(job, owner)) from err
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    if cluster and cluster not in found:
        raise _of_others(job, root, cluster, sorted(found))
    chosen = cluster or _cluster_of(found, job)
    uid = owner_of(found[chosen][0].parent)
    if uid != os.geteuid():
        _log.warning("the journal of job %s was written by user %s", job, user_name(uid))
        _tell_of_others(root, chosen, job, uid)
    if len(found) > 1:
        also = ", ".join(sorted(set(found) - {chosen}))
        _log.warning(
            "showing job %s of cluster %s; there is one of that id on %s too", job, chosen, also
        )
    return found[chosen]


def _of_others(job: str, root: Path, cluster: str, having: Sequence[str]) -> RunNotFound:
    """Return the error of a job that only other clusters than the named one have."""
    why = f"its cluster there is {' or '.join(having)}, not {cluster}"
    return RunNotFound(job, root, reason=f"{why}: see --cluster={having[0]}", clusters=having)


def _tell_of_others(root: Path, cluster: str, job: str, shown: int) -> None:
    """Say whose else a journal of this job is: nothing in one tells who had the job."""
    with contextlib.suppress(OSError):
        for uid in sorted(journal.owners_of(root, cluster, job) - {shown}):
            text = "user %s has one of job %s too: sudo -u %s slurm-health report %s"
            name = user_name(uid) if user_name(uid) != str(uid) else f"#{uid}"
            _log.warning(text, name, job, f"'{name}'" if name.startswith("#") else name, job)


def _cluster_of(found: Mapping[str, list[Path]], job: str) -> str:
    """Return the cluster that is meant where none is named.

    A user who may make a directory in a shared root can make the newest of any cluster.
    """
    own = [name for name, runs in found.items() if owner_of(runs[0].parent) == os.geteuid()]
    if not own and len(found) > 1:
        several = ", ".join(sorted(found))
        raise UsageError(f"several clusters have a job {job}: name one, --cluster={several}")
    return max(own or found, key=lambda name: changed_s(found[name][-1]))


def owner_of(directory: Path) -> int:
    """Return whose a job's directory is, which may have been removed since it was found.

    Raises:
        JournalError: it is not there any more, or cannot be looked at.
    """
    try:
        return directory.lstat().st_uid
    except OSError as err:
        raise JournalError(directory, f"cannot be read: {err.strerror or err}") from err


def user_name(uid: int) -> str:
    """Return a user's name, the number where the machine knows no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _another_owner(root: Path, job: str) -> str | None:
    """Return whose a job's directory is, None where it is the caller's or is not there."""
    clusters: list[str] = []
    with contextlib.suppress(OSError):
        clusters = journal.clusters_in(root)
    mounted = mounted_by_users(root)
    for cluster in clusters:
        if f"{cluster}/{job}" in mounted:
            continue
        with contextlib.suppress(OSError):
            uid = journal.job_directory(root, cluster, job).lstat().st_uid
            if uid != os.geteuid():
                return user_name(uid)
    return None


def _who_laid(root: Path, task: str) -> str | None:
    """Return which other user laid the name of an array's task, None where none did."""
    mounted = mounted_by_users(root)
    with contextlib.suppress(OSError):
        for cluster in journal.clusters_in(root):
            if f"{cluster}/{task}" in mounted:
                continue
            link = journal.job_directory(root, cluster, task)
            if link.is_symlink() and (uid := link.lstat().st_uid) not in {0, os.geteuid()}:
                return user_name(uid)
    return None


def _own_id(task: str, layer: str) -> str:
    return (
        f"{task} there was made by user {layer}; if the task is not {layer}'s, name it by its own"
        f" job id, which `squeue -j {task} -O JobID` prints"
    )


def _ask(job: str, owner: str) -> str:
    return (
        f"job {job} belongs to user {owner}, and only {owner} may read its journal:"
        f" ask {owner}, or an administrator, for `slurm-health report {job}`"
    )


def _runs_by_cluster(root: Path, job: str, wanted: str | None) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    refused: OSError | None = None
    for cluster in journal.clusters_in(root):
        try:
            own = journal.name_of(root, cluster, job, os.geteuid())
            found[cluster] = journal.runs_of(root, cluster, own)
        except OSError as err:  # another user's, where several share the root
            if cluster == wanted:
                raise
            refused = err
    found = {cluster: runs for cluster, runs in found.items() if runs}
    if refused is not None and not found:
        raise refused
    return found


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
        with contextlib.suppress(OSError):  # not there, or not to be seen
            return path.lstat().st_mtime
    return 0.0


# The nodes of a `slurm-health run` that share no directory leave the journal to node 0. Each notes
# beside its own journals where that is.


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that has a job's journal, and the directory there."""

    host: str
    directory: str


def note_elsewhere(root: Path, cluster: str, job: int, elsewhere: Elsewhere) -> None:
    """Write down where a job's journal is; nothing where that cannot be written."""
    data = msgspec.json.encode(elsewhere) + b"\n"
    with (
        contextlib.suppress(OSError),
        private_files.directory(root, cluster, str(job), owner=os.geteuid(), make=True) as handle,
        private_files.opened(handle, _ELSEWHERE, os.O_WRONLY | os.O_TRUNC, make=True) as file,
    ):
        os.write(file, data)


def elsewhere_text(root: Path, job: str) -> str:
    """Say where a job's journal is, nothing where no note of the caller's own says it."""
    with contextlib.suppress(OSError):
        for cluster in sorted(journal.clusters_in(root)):
            with contextlib.suppress(OSError, ValueError):
                found = _noted(root, cluster, job)
                host, directory = one_line(found.host), one_line(found.directory)
                return f"it is on {host}, in {directory}: run slurm-health report {job} there."
    return ""


def _noted(root: Path, cluster: str, job: str) -> Elsewhere:
    with private_files.directory(root, cluster, job, owner=os.geteuid()) as handle:
        data = private_files.read(handle, _ELSEWHERE, most_bytes=_ELSEWHERE_BYTES)
    return from_json(data, Elsewhere)
