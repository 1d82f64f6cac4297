# SPDX-License-Identifier: Apache-2.0
"""Brings an index up to date with the journals: new jobs, jobs that went on, jobs that are gone.

A job whose journal was looked at once it was final is not looked at again, so an index of years
costs one listing. One that could not be read never is final.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurm_health.fleet.history.database import Busy, DamagedIndex, is_index
from slurm_health.fleet.history.index import Index
from slurm_health.fleet.history.place import IndexPlace
from slurm_health.fleet.history.read import Others
from slurm_health.fleet.standing.observation import (
    NEVER_S,
    SETTLED_S,
    UNCHANGED,
    JobSeen,
    unread,
)
from slurm_health.records.errors import IndexUnusable, JournalError
from slurm_health.system import journal, private_files
from slurm_health.system.accounts import Accounts
from slurm_health.system.proc import mounted_by_users

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


def _silent(_done: int, _of: int) -> None:
    pass


@contextlib.contextmanager
def opened(
    place: IndexPlace,
    root: Path,
    *,
    now_s: float,
    rebuild: bool = False,
    progress: Progress = _silent,
) -> Iterator[Index]:
    """Hold open an index that says what the journals say now.

    One that is damaged, or of another version, is made anew. A file that another process keeps
    locked is brought up to date in memory, and a log line says so. What is root's is used as it is.

    Raises:
        IndexUnusable: it cannot be used where it lies.
        JournalError: the journals cannot be listed.
    """
    if place.why_in_memory:
        _log.warning(
            "the history is indexed anew, and the index is not kept: %s", place.why_in_memory
        )
    with _told(place):
        if rebuild and not place.only_read:
            _remove(place)
        with contextlib.closing(_open_and_refresh(place, root, now_s, progress)) as index:
            yield index


@contextlib.contextmanager
def _told(place: IndexPlace) -> Iterator[None]:
    """Make an error for a person of what a database says."""
    try:
        yield
    except DamagedIndex as err:
        raise IndexUnusable(
            str(place), f"is damaged: {err}", fix="--rebuild makes it anew"
        ) from err
    except Busy as err:
        told = f"another process works on it: {err}"
        raise IndexUnusable(str(place), told, fix="try again when that has ended") from err


def _open_and_refresh(place: IndexPlace, root: Path, now_s: float, progress: Progress) -> Index:
    for attempt in (1, 2):
        index = None
        try:
            index = Index(place)
            _refresh(index, root, now_s, progress)
        except DamagedIndex as err:
            if index is not None:
                index.close()
            if attempt == 2 or not _may_replace(place):
                raise IndexUnusable(str(place), str(err)) from err
            _log.info("the history is indexed anew: the index %s", err)
            _remove(place)
        except BaseException:
            if index is not None:
                index.close()
            raise
        else:
            return index
    raise AssertionError("two attempts end in an index or an error")


def _refresh(index: Index, root: Path, now_s: float, progress: Progress) -> None:
    if index.place.only_read:
        index.clusters()  # or it is damaged
        return
    try:
        bring_up_to_date(index, root, now_s=now_s, progress=progress)
    except Busy:
        _refresh_beside(index, root, now_s, progress)


def _refresh_beside(index: Index, root: Path, now_s: float, progress: Progress) -> None:
    """Bring up to date a copy of an index that another process keeps locked.

    Whoever may read a file can lock it for as long as they like; answers must not age with that.
    """
    with contextlib.suppress(Busy):
        index.move_to_memory()
        bring_up_to_date(index, root, now_s=now_s, progress=progress)
        _log.warning(
            "another process holds the index %s (fuser shows which): what is new was read for"
            " this answer and is not kept",
            index.place,
        )
        return
    _log.warning("another process works on the index; the answer may lack the latest jobs")


def _may_replace(place: IndexPlace) -> bool:
    """Tell whether the index is ours to remove: a file that a person named may be anything."""
    if place.path is None or place.only_read:
        return False
    if not place.named:
        return True
    with contextlib.suppress(OSError):
        return is_index(place.path)
    return False


def _remove(place: IndexPlace) -> None:
    if place.path is None or (place.path.exists() and not _may_replace(place)):
        return
    for name in (place.path, Path(f"{place.path}-journal")):
        name.unlink(missing_ok=True)


def bring_up_to_date(
    index: Index,
    root: Path,
    *,
    now_s: float,
    progress: Progress = _silent,
    accounts: Accounts | None = None,
) -> None:
    """Put into an index what the journals say now.

    Who has several ids is one user in it.

    Raises:
        Busy: another process works on it.
        DamagedIndex: it cannot be used.
        JournalError: the journals cannot be listed.
    """
    known = index.jobs(root)
    try:
        found = set(_jobs(root))
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    gone = [each for each, (_, ours) in known.items() if ours and each not in found]
    if gone:
        index.forget(gone)
    # What became final since the last look may have changed before: it is looked at once more.
    open_ = [each for each in found if each not in known or known[each][0] != SETTLED_S]
    # What could not be read comes last: it may take all the time that its user is given.
    open_.sort(key=lambda each: (each in known and known[each][0] == NEVER_S, each))
    looks = journal.statuses([journal.job_directory(root, *each) for each in open_])
    known_looks = {each: look for each, look in zip(open_, looks, strict=True) if look is not None}
    accounts = accounts or Accounts()
    others = Others(root, {each: look.uid for each, look in known_looks.items()}, accounts)
    settled = []
    for done, ((cluster, job), look) in enumerate(known_looks.items()):
        progress(done, len(known_looks))
        if look.trouble:
            seen: JobSeen | None = unread(look.trouble)
        else:
            stamp = index.stamp(cluster, job)
            seen = _read_if_changed(root, cluster, job, look.uid, stamp, others)
        if seen is UNCHANGED:
            # Another process may have put it in only now.
            final_s, _ = known.get((cluster, job), (NEVER_S, True))
            if final_s < now_s:
                settled.append((cluster, job))
        elif seen is not None:
            seen = msgspec.structs.replace(seen, uid=accounts.user(seen.uid))
            index.keep(root, cluster, job, seen, now_s=now_s)
    if settled:
        index.settle(settled, now_s=now_s)


def _read_if_changed(
    root: Path, cluster: str, job: str, uid: int, stamp: str | None, others: Others
) -> JobSeen | None:
    """Return what a job says, `UNCHANGED` where it is as it was; None where that is not known."""
    from slurm_health.fleet.history.read import read_job, stamp_of  # an answer alone does without

    try:
        if uid != os.geteuid():
            return others.read_if_changed(uid, cluster, job, stamp)
        if stamp is not None and stamp == stamp_of(root, cluster, job):
            return UNCHANGED
        return read_job(root, cluster, job)
    except FileNotFoundError:
        return None  # it is being removed
    except OSError as err:
        return unread(err.strerror or str(err))


def _jobs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the jobs that have a journal, by cluster and id."""
    mounted = mounted_by_users(root)
    for cluster in journal.clusters_in(root):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            with private_files.directory(root, cluster, owner=None) as handle:
                listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
            try:
                with os.scandir(listing) as entries:
                    for each in entries:
                        known = journal.JOURNAL_NAME.fullmatch(each.name)
                        if f"{cluster}/{each.name}" in mounted:
                            continue
                        if known and each.is_dir(follow_symlinks=False):
                            yield cluster, each.name
            finally:
                os.close(listing)
