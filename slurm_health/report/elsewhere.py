# SPDX-License-Identifier: Apache-2.0
"""Where the journal of a job is that this machine took part in and does not have.

The nodes of a `slurm-health run` that share no directory leave the journal to node 0. Each notes
beside its own journals where that is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from slurm_health import private_files
from slurm_health.core.text import one_line

_NAME = "elsewhere.json"
_MOST_BYTES = 1 << 16


class Elsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that has a job's journal, and the directory there."""

    host: str
    directory: str


def note(root: Path, cluster: str, job: int, elsewhere: Elsewhere) -> None:
    """Write down where a job's journal is; nothing where that cannot be written."""
    data = msgspec.json.encode(elsewhere) + b"\n"
    with (
        contextlib.suppress(OSError),
        private_files.directory(root, cluster, str(job), owner=os.geteuid(), make=True) as handle,
        private_files.opened(handle, _NAME, os.O_WRONLY | os.O_TRUNC, make=True) as file,
    ):
        os.write(file, data)


def of(root: Path, job: str) -> str:
    """Say where a job's journal is, nothing where this machine does not know."""
    with contextlib.suppress(OSError):
        for cluster in sorted(path.name for path in root.iterdir() if path.is_dir()):
            with contextlib.suppress(OSError, ValueError):
                found = _noted(root, cluster, job)
                host, directory = one_line(found.host), one_line(found.directory)
                return f"it is on {host}, in {directory}: run slurm-health report {job} there."
    return ""


def _noted(root: Path, cluster: str, job: str) -> Elsewhere:
    with private_files.directory(root, cluster, job, owner=None) as handle:
        data = private_files.read(handle, _NAME, most_bytes=_MOST_BYTES)
    return msgspec.json.decode(data, type=Elsewhere)
