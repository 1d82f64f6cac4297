# SPDX-License-Identifier: Apache-2.0
"""Where the index lies, and whether it can be trusted.

Each user has one, in the cache directory of their home. A site may keep one for all: root writes
it, and any user who may read it is answered from it. A file that another user could have written is
never used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.errors import IndexUnusable

VARIABLE = "SLURM_HEALTH_INDEX"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True)
class IndexPlace:
    """Where an index is. Without `path`, it is in memory, and nothing is left of it.

    `named`: a person has chosen the file. `only_read`: it is root's, and another user asks. Another
    process that brings the index up to date commits many times a second: `lock_timeout_s` is long.
    """

    path: Path | None
    named: bool = False
    only_read: bool = False
    why_in_memory: str = ""
    lock_timeout_s: float = 10.0

    def __str__(self) -> str:
        return str(self.path or "in memory")


def choose(
    option: str | None, environ: Mapping[str, str], root: Path, *, site: str | None = None
) -> IndexPlace:
    """Return where the index of the journals below `root` is; the directory of our own is made.

    Args:
        option: a file that the caller names.
        environ: it may name one in SLURM_HEALTH_INDEX.
        root: the journals'.
        site: the one that the site names for all; our own is used where we may not read it.

    Raises:
        IndexUnusable: the file that was named is not to be trusted, or cannot be.
    """
    chosen = option or environ.get(VARIABLE) or (site if site and _is_for_us(site) else None)
    path = Path(chosen).expanduser().absolute() if chosen else _default(environ, root)
    if path is None:
        return IndexPlace(path=None, why_in_memory="there is no home directory to keep it in")
    try:
        if not chosen:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return IndexPlace(path=path, named=bool(chosen), only_read=_is_roots(path))
    except (OSError, IndexUnusable) as err:
        if chosen:
            if isinstance(err, IndexUnusable):
                raise
            raise IndexUnusable(path, err.strerror or str(err)) from err
        told = f"{path.parent}: {err.strerror}" if isinstance(err, OSError) else str(err)
        return IndexPlace(path=None, why_in_memory=told)


def _is_for_us(site: str) -> bool:
    """Tell whether we may read the site's index, or make it."""
    path = Path(site).expanduser()
    if os.access(path, os.R_OK):
        return True
    return not os.access(path, os.F_OK) and os.access(path.parent, os.W_OK | os.X_OK)


def _default(environ: Mapping[str, str], root: Path) -> Path | None:
    # One per root: jobs of two roots may have the same ids.
    name = f"history-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}.sqlite"
    cache = environ.get("XDG_CACHE_HOME", "")
    if cache.startswith("/"):
        return Path(cache) / "slurm-health" / name
    try:
        return Path.home() / ".cache" / "slurm-health" / name
    except RuntimeError:
        return None


def _is_roots(path: Path) -> bool:
    """Tell whether this index is one that root keeps for others.

    Raises:
        IndexUnusable: another user could have written it.
        OSError: nothing can be written there, and nothing is there to be read.
    """
    user = os.geteuid()
    parent = path.parent.stat()
    # Who can make files beside it can make SQLite believe that a change was cut short.
    if parent.st_mode & _OTHERS_WRITE or parent.st_uid not in {0, user}:
        raise IndexUnusable(path, f"others than you and root can write {path.parent}")
    try:
        found = path.lstat()
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
        return False
    if not stat.S_ISREG(found.st_mode):
        raise IndexUnusable(path, "is not a plain file")
    if found.st_uid not in {0, user} or found.st_mode & _OTHERS_WRITE:
        raise IndexUnusable(path, "others than you and root can write it")
    return found.st_uid != user
