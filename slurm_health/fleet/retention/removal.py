# SPDX-License-Identifier: Apache-2.0
"""Journals that may be removed: which there are, what they take, which of their jobs live.

Each is taken away so that it is there whole, or not at all: it is renamed first, and what was
renamed and not yet taken away goes the next time. Everything is named relative to a directory that
is held open, and no link is followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_health.fleet.retention.rules import JobJournal
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.system import journal, private_files
from slurm_health.system.journal import clusters_in, job_of
from slurm_health.system.proc import mounted_by_users
from slurm_health.system.slurm.client import Client

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 8  # a journal has two levels
_MOST_ENTRIES = 1_000_000
_BLOCK = 512  # st_blocks counts these, whatever the filesystem's are
_REMOVED = re.compile(r"\.removed-([0-9]{1,10})(-[0-9a-f]{8,16})?", re.ASCII)
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class UnendedJobs:
    """What Slurm says: its cluster's name, and its jobs that have not ended; or why nothing."""

    cluster: str = ""
    jobs: frozenset[str] = frozenset()
    why_not: str = ""


def journals(root: Path, *, uid: int | None) -> list[JobJournal]:
    """Return the journals of one user, or of all users where `uid` is None.

    Raises:
        JournalError: the root cannot be read.
    """
    try:
        names = journal.clusters_in(root)
    except OSError as err:
        raise JournalError(root, f"cannot be read: {err.strerror or err}") from err
    return [journal for name in names for journal in _of_cluster(root, name, uid)]


def _of_cluster(root: Path, cluster: str, uid: int | None) -> Iterator[JobJournal]:
    mounted = mounted_by_users(root)
    with contextlib.suppress(OSError), opened(root, cluster) as handle, listed(handle) as names:
        for each in names:
            known = journal.JOURNAL_NAME.fullmatch(each.name)
            if not known or f"{cluster}/{each.name}" in mounted:
                continue
            if not each.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):  # it is being removed
                owner = os.stat(each.name, dir_fd=handle, follow_symlinks=False).st_uid
                if uid in {None, owner}:
                    size_bytes, written_s = measured(handle, each.name)
                    yield JobJournal(
                        cluster=cluster,
                        job=each.name,
                        uid=owner,
                        size_bytes=size_bytes,
                        written_s=written_s,
                    )


def opened(root: Path, cluster: str) -> contextlib.AbstractContextManager[int]:
    """Hold open a cluster's directory; what others could move is refused.

    Raises:
        OSError: it cannot be opened, or is refused.
    """
    return private_files.directory(root, cluster, owner=None)


@contextlib.contextmanager
def listed(handle: int) -> Iterator[list[os.DirEntry[str]]]:
    """List a directory that is held open, for as long as the names are used."""
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    try:
        with os.scandir(listing) as entries:
            yield list(entries)
    finally:
        os.close(listing)


def measured(handle: int, name: str) -> tuple[int, float]:
    """Return what a directory takes on disk, and when anything in it was last written.

    No link is followed. A user may have laid down a tree without end: what lies deeper than any
    journal, or is more than a million entries, is not counted.

    Raises:
        OSError: it cannot be read.
    """
    size_bytes, written_s, left = 0, 0.0, _MOST_ENTRIES

    def count(outer: int, directory: str, depth: int) -> None:
        nonlocal size_bytes, written_s, left
        inside = os.open(directory, DIRECTORY, dir_fd=outer)
        try:
            with os.scandir(inside) as entries:
                seen = [".", *(each.name for each in itertools.islice(entries, left))]
            left -= len(seen) - 1
            for each in seen:
                found = os.stat(each, dir_fd=inside, follow_symlinks=False)
                is_directory = stat.S_ISDIR(found.st_mode)
                # A file of many names, which no journal has, takes its room once.
                names = 1 if is_directory else max(1, found.st_nlink)
                size_bytes += found.st_blocks * _BLOCK // names
                written_s = max(written_s, found.st_mtime)
                if each != "." and is_directory and depth < _DEEPEST:
                    count(inside, each, depth + 1)
        finally:
            os.close(inside)

    count(handle, name, 1)
    return size_bytes, written_s


def alive(environ: Mapping[str, str], *, uid: int | None) -> UnendedJobs:
    """Ask Slurm, once, which jobs of one user, or of all users, have not ended."""
    client = Client(environ, patience_s=0)
    try:
        return UnendedJobs(
            cluster=client.cluster_name(), jobs=frozenset(map(str, client.unended(uid)))
        )
    except SlurmError as err:
        return UnendedJobs(why_not=str(err))


class Changed(Exception):
    """The journal was written, or became another's, since it was chosen."""


def remove(root: Path, journal: JobJournal) -> None:
    """Take one journal away.

    Raises:
        Changed: it is not as it was when it was chosen, and is left.
        OSError: it cannot be removed, or not wholly.
    """
    with opened(root, journal.cluster) as handle:
        owner = os.stat(journal.job, dir_fd=handle, follow_symlinks=False).st_uid
        if owner != journal.uid:
            raise Changed(f"it belongs to user {owner} now")
        if measured(handle, journal.job)[1] != journal.written_s:
            raise Changed("it was written just now")
        away = _name_for(journal.job)
        os.rename(journal.job, away, src_dir_fd=handle, dst_dir_fd=handle)
        _take_away(handle, away)


def sweep(root: Path, removed: Collection[JobJournal], *, uid: int | None) -> None:
    """Take away what interrupted removals have left, and the names of removed tasks of arrays.

    What cannot be removed is left, and what a user has mounted something on is not even asked.
    """
    with contextlib.suppress(OSError):
        for cluster in clusters_in(root):
            mounted = mounted_by_users(root)
            jobs = {each.job for each in removed if each.cluster == cluster}
            with (
                contextlib.suppress(OSError),
                opened(root, cluster) as handle,
                listed(handle) as names,
            ):
                for each in names:
                    if f"{cluster}/{each.name}" in mounted:
                        continue
                    with contextlib.suppress(OSError):
                        owner = os.stat(each.name, dir_fd=handle, follow_symlinks=False).st_uid
                        if uid in {None, owner}:
                            _sweep(handle, each.name, jobs)


def _sweep(handle: int, name: str, removed: Collection[str]) -> None:
    if _REMOVED.fullmatch(name):
        _take_away(handle, name)
    elif _TASK.fullmatch(name) and os.readlink(name, dir_fd=handle) in removed:
        os.unlink(name, dir_fd=handle)


def _name_for(job: str) -> str:
    """Return a name for what is to be taken away; no file can have it already."""
    return f".removed-{job_of(job)}-{secrets.token_hex(8)}"


def _take_away(handle: int, name: str) -> None:
    """Take a directory away, however deep: those in it are renamed to stand beside it.

    No link is followed, no path is longer than one name, and no more than one directory is open.

    Raises:
        OSError: it cannot be removed, or not wholly: a user goes on to fill it, or it has more
            entries than are removed at once.
    """
    job = name.removeprefix(".removed-").partition("-")[0]
    directories, left = [name], _MOST_ENTRIES
    while directories:
        away = directories.pop()
        inside = os.open(away, DIRECTORY, dir_fd=handle)
        try:
            with os.scandir(inside) as entries:
                names = [each.name for each in itertools.islice(entries, left)]
            left -= len(names)
            for each in names:
                if not stat.S_ISDIR(os.stat(each, dir_fd=inside, follow_symlinks=False).st_mode):
                    os.unlink(each, dir_fd=inside)
                    continue
                beside = _name_for(job)
                os.rename(each, beside, src_dir_fd=inside, dst_dir_fd=handle)
                directories.append(beside)
        finally:
            os.close(inside)
        os.rmdir(away, dir_fd=handle)
