# SPDX-License-Identifier: Apache-2.0
"""A file that a command writes for others, at once and whole."""

from __future__ import annotations

import os
from pathlib import Path

import click


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file that everybody may read.

    Raises:
        click.UsageError: it cannot be written.
    """
    from slurm_health.system.private_files import publish

    try:
        publish(path, data)
    except OSError as err:
        why = err.strerror or str(err)
        raise click.UsageError(f"{path} cannot be written: {why}{_hint(path)}") from err


def _hint(path: Path) -> str:
    parent = path.absolute().parent
    return "" if os.access(parent, os.W_OK) else f"; {parent} must be a directory you may write"
