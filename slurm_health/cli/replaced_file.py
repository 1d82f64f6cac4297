# SPDX-License-Identifier: Apache-2.0
"""A file that a command writes for others, at once and whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import click


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file that all users may read.

    Raises:
        click.UsageError: it cannot be written.
    """
    from slurm_health.system.private_files import publish

    try:
        publish(path, data)
    except OSError as err:
        why = err.strerror or str(err)
        raise click.UsageError(f"{path} cannot be written: {why}{_hint(path)}") from err


def write_named(path: Path, data: bytes) -> None:
    """Write a file that a person has named: who reads it meanwhile sees the old one, or the new.

    It has the mode that it had. A pipe or a terminal (`/dev/stdout`) is written to as it is. A link
    is followed if the caller or root has laid it: where any user may, it could lead anywhere.

    Raises:
        OSError: it cannot be written.
    """
    from slurm_health.system.private_files import publish

    if path.is_symlink() and not _trusted(path.lstat()):
        publish(path, data)  # in its stead, where that is allowed
        return
    try:
        found = path.stat()
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        publish(path.resolve(), data, mode=0o666 & ~umask)
        return
    if stat.S_ISREG(found.st_mode):
        publish(path.resolve(), data, mode=stat.S_IMODE(found.st_mode))
    elif _trusted(found):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
            file.write(data)
    else:
        raise PermissionError(errno.EPERM, f"it is of user {found.st_uid}, and no plain file")


def _trusted(found: os.stat_result) -> bool:
    return found.st_uid in {0, os.geteuid()}


def _hint(path: Path) -> str:
    parent = path.absolute().parent
    return "" if os.access(parent, os.W_OK) else f"; {parent} must be a directory you may write"
