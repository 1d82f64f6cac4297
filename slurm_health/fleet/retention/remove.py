# SPDX-License-Identifier: Apache-2.0
"""Takes journals away: each is there whole, or not at all.

A journal is renamed first, so that one who is interrupted leaves none in pieces; what was renamed
and not yet taken away goes the next time. Everything is named relative to a directory that is held
open, and no link is followed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

from slurm_health.fleet.retention import listing
from slurm_health.fleet.retention.rules import JobJournal
from slurm_health.system.journal import clusters_in, job_of

_REMOVED = re.compile(r"\.removed-([0-9]{1,10})(-[0-9a-f]{8,16})?", re.ASCII)
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}", re.ASCII)


_MOST_ENTRIES = 1_000_000  # of one journal, in one removal; the next one goes on


class Changed(Exception):
    """The journal was written, or became another's, since it was chosen."""


def remove(root: Path, journal: JobJournal) -> None:
    """Take one journal away.

    Raises:
        Changed: it is not as it was when it was chosen, and is left.
        OSError: it cannot be removed, or not wholly.
    """
    with listing.opened(root, journal.cluster) as handle:
        owner = os.stat(journal.job, dir_fd=handle, follow_symlinks=False).st_uid
        if owner != journal.uid:
            raise Changed(f"it belongs to user {owner} now")
        if listing.measured(handle, journal.job)[1] != journal.written_s:
            raise Changed("it was written just now")
        away = _name_for(journal.job)
        os.rename(journal.job, away, src_dir_fd=handle, dst_dir_fd=handle)
        _take_away(handle, away)


def sweep(root: Path, removed: Collection[JobJournal], *, uid: int | None) -> None:
    """Take away what interrupted removals have left, and the names of removed tasks of arrays.

    What cannot be removed is left.
    """
    with contextlib.suppress(OSError):
        for cluster in clusters_in(root):
            jobs = {each.job for each in removed if each.cluster == cluster}
            with (
                contextlib.suppress(OSError),
                listing.opened(root, cluster) as handle,
                listing.listed(handle) as names,
            ):
                for each in names:
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
        inside = os.open(away, listing.DIRECTORY, dir_fd=handle)
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
