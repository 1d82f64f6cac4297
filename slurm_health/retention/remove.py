# SPDX-License-Identifier: Apache-2.0
"""Takes journals away: each is there whole, or not at all.

A journal is renamed first, so that one who is interrupted leaves none in pieces; what was renamed
and not yet taken away goes the next time. Everything is named relative to a directory that is held
open, and no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from slurm_health.core.retention import JobJournal
from slurm_health.retention import found

_REMOVED = re.compile(r"\.removed-([0-9]{1,10})", re.ASCII)
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,10}", re.ASCII)


class Changed(Exception):
    """The journal was written, or became another's, since it was chosen."""


def remove(root: Path, journal: JobJournal) -> None:
    """Take one journal away.

    Raises:
        Changed: it is not as it was when it was chosen, and is left.
        OSError: it cannot be removed, or not wholly.
    """
    with found.opened(root, journal.cluster) as handle:
        owner = os.stat(journal.job, dir_fd=handle, follow_symlinks=False).st_uid
        if owner != journal.uid:
            raise Changed(f"it belongs to user {owner} now")
        if found.measured(handle, journal.job)[1] != journal.written_s:
            raise Changed("it was written just now")
        away = f".removed-{journal.job}"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(away, dir_fd=handle)  # of an earlier job with this id
        os.rename(journal.job, away, src_dir_fd=handle, dst_dir_fd=handle)
        shutil.rmtree(away, dir_fd=handle)


def sweep(root: Path, removed: Collection[JobJournal], *, uid: int | None) -> None:
    """Take away what interrupted removals have left, and the names of removed tasks of arrays.

    What cannot be removed is left.
    """
    with contextlib.suppress(OSError):
        for cluster in [each.name for each in os.scandir(root)]:
            jobs = {each.job for each in removed if each.cluster == cluster}
            with (
                contextlib.suppress(OSError),
                found.opened(root, cluster) as handle,
                found.listed(handle) as names,
            ):
                for each in names:
                    with contextlib.suppress(OSError):
                        owner = os.stat(each.name, dir_fd=handle, follow_symlinks=False).st_uid
                        if uid in {None, owner}:
                            _sweep(handle, each.name, jobs)


def _sweep(handle: int, name: str, removed: Collection[str]) -> None:
    if _REMOVED.fullmatch(name):
        shutil.rmtree(name, dir_fd=handle)
    elif _TASK.fullmatch(name) and os.readlink(name, dir_fd=handle) in removed:
        os.unlink(name, dir_fd=handle)
