# SPDX-License-Identifier: Apache-2.0
"""The directory of a run, and the runs of a job."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from slurm_health.records.records import JobOutcome, Record, RunStarted, VerdictReached
from slurm_health.system import private_files
from slurm_health.system.journal.files import MASTER, read_all, unusable
from slurm_health.system.proc import mounted_by_users

_LABEL = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
# Slurm's names of clusters. If users share a root, any user may make a directory whose name is no
# text at all.
_CLUSTER = re.compile(r"[\w-][\w.-]{0,254}", re.ASCII)
JOURNAL_NAME = re.compile(r"[0-9]{1,10}(?:\.[0-9a-f]{16})?", re.ASCII)
"""A directory of a job in a cluster's: the job's id, or that with a random suffix."""
# Every step of a job has a number for its check; further starts of that step lie this far apart.
_NEXT_START = 1000


def job_directory(root: Path, cluster: str, job: int | str) -> Path:
    """Return the directory of one job's attempts."""
    return root / cluster / str(job)


def clusters_in(root: Path) -> list[str]:
    """Return the clusters that have journals, or a link; none if the root is not there.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if not entry.is_file(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    mounted = mounted_by_users(root)
    return [name for name in names if _CLUSTER.fullmatch(name) and name not in mounted]


def name_of(
    root: Path, cluster: str, job: str, owner: int, *, make: bool = False, quick: bool = False
) -> str:
    """Return the name of the directory of a user's job: its id, or its id with a random suffix.

    If users share a root, any user can make a directory of any id, or a hard link to a file of the
    job's user. If the id is taken, the user's own directory is `12.` with a random suffix.

    Args:
        root: the directory of all journals.
        cluster: the job's cluster.
        job: its id, or `12_3` for a task of an array.
        owner: of the job.
        make: make the directory, so that no other user can take its name; if that is taken, one
            with a suffix, unless there is one.
        quick: without a directory of the job's id, do not look for others, which lists the cluster.

    Raises:
        OSError: nothing can be made there, or it cannot be read.
    """
    try:
        taken = f"{cluster}/{job}" in mounted_by_users(root)
        if not taken and private_files.is_own_directory((root / cluster / job).lstat(), owner):
            return job
    except FileNotFoundError:
        if quick or (make and _made(root, cluster, job, owner)):
            return job
    except PermissionError:
        pass  # another user's filesystem is mounted there
    if make and not _beside(root / cluster, job, owner):
        with private_files.directory(root, cluster, owner=owner) as place:
            os.mkdir(f"{job}.{os.urandom(8).hex()}", 0o700, dir_fd=place)
    # If several processes made one at the same time, all take the first by name.
    return min(_beside(root / cluster, job, owner), default=job)


def _made(root: Path, cluster: str, job: str, owner: int) -> bool:
    """Make a job's directory; return False if there is one that is not this user's."""
    with private_files.directory(root, cluster, owner=owner, make=True) as place:
        try:
            os.mkdir(job, 0o700, dir_fd=place)
        except FileExistsError:
            return _is_own(lambda: os.stat(job, dir_fd=place, follow_symlinks=False), owner)
    return True


def _is_own(status: Callable[[], os.stat_result], owner: int) -> bool:
    """Return whether a directory is this user's alone, and not gone, or mounted over."""
    try:
        return private_files.is_own_directory(status(), owner)
    except (FileNotFoundError, PermissionError):
        return False


def job_of(name: str) -> str:
    """Return the job of a directory, or of a link."""
    return name.partition(".")[0]


def _beside(cluster: Path, job: str, owner: int) -> list[str]:
    mounted = mounted_by_users(cluster.parent)
    with contextlib.suppress(FileNotFoundError), os.scandir(cluster) as entries:
        return [
            entry.name
            for entry in entries
            if entry.name.startswith(f"{job}.")
            and f"{cluster.name}/{entry.name}" not in mounted
            and JOURNAL_NAME.fullmatch(entry.name)
            and _is_own(partial(entry.stat, follow_symlinks=False), owner)
        ]
    return []


def owners_of(root: Path, cluster: str, job: str) -> set[int]:
    """Return the users who have a directory of a job, under its id or beside it.

    Raises:
        OSError: the cluster's directory cannot be listed.
    """
    owners = set()
    mounted = mounted_by_users(root)
    with os.scandir(root / cluster) as entries:
        for entry in entries:
            if f"{cluster}/{entry.name}" in mounted:
                continue
            named = job_of(entry.name) == job and JOURNAL_NAME.fullmatch(entry.name)
            if named and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # it is being removed, or mounted over
                    owners.add(entry.stat(follow_symlinks=False).st_uid)
    return owners


def label_of(attempt: int, check: int) -> str:
    """Return the name of a run's directory: `2`, and `2-3` for the third check of attempt 2."""
    return f"{attempt}-{check}" if check > 1 else str(attempt)


def attempt_and_check(label: str) -> tuple[int, int] | None:
    """Return attempt and check from the name of a run's directory, None for any other name."""
    match = _LABEL.fullmatch(label)
    return (int(match[1]), int(match[2] or 1)) if match else None


def directory_of_check(root: Path, started: RunStarted) -> tuple[Path, RunStarted]:
    """Return the directory for a check, and the first record it has or is to get.

    One that was cut short begins again, in a directory of its own, unless it has its verdict: then
    it is taken over, so that nothing is done twice. So it is with this very name however it stands,
    as whoever gave both the name has not heard how the first ended; with another one if it is of
    the very same job start, and has not ended, or its requeue did not happen: the job is here.

    Raises:
        JournalError: an older journal cannot be read.
    """
    for directory, begun, records in _checks_of(root, started):
        if begun is None:
            return directory, started
        finished = [record for record in records if isinstance(record, JobOutcome)]
        over = finished and not finished[-1].leaves
        ours = begun.run_id == started.run_id or (not over and _same_start(begun, started))
        if ours and any(isinstance(record, VerdictReached) for record in records):
            return directory, begun
    raise AssertionError("labels never end")


def directory_of_failed_check(root: Path, started: RunStarted) -> tuple[Path, RunStarted]:
    """Return the directory of the last check of this name, one for it if it has none yet.

    With it comes the first record that it has or is to get.

    Raises:
        JournalError: an older journal cannot be read.
    """
    last = None
    for directory, begun, _ in _checks_of(root, started):
        if begun is None:
            return last or (directory, started)
        if begun.run_id == started.run_id:
            last = directory, begun
    raise AssertionError("labels never end")


def _checks_of(root: Path, started: RunStarted) -> Iterator[_Begun]:
    try:
        name = name_of(root, started.cluster, str(started.job_id), os.geteuid(), make=True)
    except OSError as err:
        job = job_directory(root, started.cluster, started.job_id)
        raise unusable(job, "written", err) from err
    labels = (label_of(started.attempt, number) for number in itertools.count(1))
    return _begun(job_directory(root, started.cluster, name), labels)


def directory_of_start(job: Path, *, attempt: int, step: int, run_id: str) -> Path:
    """Return the directory of a check that several processes begin together: the same in all.

    Args:
        job: the job's directory.
        attempt: Slurm's restart count.
        step: the job's step of these processes.
        run_id: the name of this start of the step, and of its check.

    Raises:
        JournalError: an older journal cannot be read.
    """
    # A check by itself takes a step and the next free number, so none of them is this one's.
    labels = (label_of(attempt, number) for number in itertools.count(step + 2, _NEXT_START))
    runs = _begun(job, labels)
    return next(path for path, begun, _ in runs if begun is None or begun.run_id == run_id)


_Begun = tuple[Path, RunStarted | None, list[Record]]


def _begun(job: Path, labels: Iterable[str]) -> Iterator[_Begun]:
    """Yield the runs of these names: the directory, how it began, and what its master wrote.

    A run that nobody has begun has no beginning.
    """
    for label in labels:
        records = [entry.record for entry in read_all(job / label, MASTER) if entry.record]
        begun = next((record for record in records if isinstance(record, RunStarted)), None)
        yield job / label, begun, records


def _same_start(before: RunStarted, now: RunStarted) -> bool:
    """Tell a run of this very start from one of an older job that had the same id."""
    return (
        before.nodes == now.nodes
        and before.user == now.user
        and before.start_time_s == now.start_time_s
    )


def link_array_task(root: Path, started: RunStarted) -> None:
    """Link the directory of an array task to the id that its user knows, `12_3`.

    If Slurm counts anew, an older task may have that id too: the newer one takes it. A link that
    cannot be made, for example because another user has taken its name, costs the name and not the
    check: it is logged.
    """
    shared = private_files.directory(root, started.cluster, owner=os.geteuid(), make=True)
    try:
        with shared as cluster:
            name = name_of(root, started.cluster, str(started.job_id), os.geteuid())
            _link(cluster, started.array, name)
    except OSError as err:
        path = job_directory(root, started.cluster, started.array)
        why = err.strerror or err
        import logging  # nodes that only read and write do not need it

        log = logging.getLogger(__name__)
        log.warning("%s cannot be made (%s): report %d finds it", path, why, started.job_id)


def _link(directory: int, name: str, target: str) -> None:
    with contextlib.suppress(OSError):
        if os.readlink(name, dir_fd=directory) == target:
            return
    made = f".{name}.{target}"
    with contextlib.suppress(FileExistsError):
        os.symlink(target, made, dir_fd=directory)
    try:
        os.replace(made, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made, dir_fd=directory)
        raise


def linked_to(root: Path, cluster: str, task: str) -> str:
    """Return the name of the directory that `12_3` links to, empty if it is no link to follow.

    If users share a root, any user may make a link: only the directory's owner's, or root's, is
    followed.
    """
    link = job_directory(root, cluster, task)
    mounted = mounted_by_users(root)
    with contextlib.suppress(OSError):
        name = str(link.readlink()) if f"{cluster}/{task}" not in mounted else ""
        known = JOURNAL_NAME.fullmatch(name) and f"{cluster}/{name}" not in mounted
        if known and link.lstat().st_uid in {0, link.with_name(name).lstat().st_uid}:
            return name
    return ""


def runs_of(root: Path, cluster: str, job: str, *, owner: int | None = None) -> list[Path]:
    """Return the directories of a job's runs, oldest first; none if there is no such job.

    Args:
        root: the directory of all journals.
        cluster: the job's cluster.
        job: its directory's name, or `12_3` for a task of an array.
        owner: of the job, None for any.

    Raises:
        OSError: its directory cannot be read, or is refused.
    """
    job = linked_to(root, cluster, job) or job
    if f"{cluster}/{job}" in mounted_by_users(root):
        raise PermissionError(errno.EPERM, f"{cluster}/{job}: a user has mounted something there")
    try:
        with private_files.directory(root, cluster, job, owner=owner) as handle:
            names = private_files.directories_in(handle)
    except FileNotFoundError:
        return []
    labelled = [(label, name) for name in names if (label := attempt_and_check(name))]
    return [job_directory(root, cluster, job) / name for _, name in sorted(labelled)]
