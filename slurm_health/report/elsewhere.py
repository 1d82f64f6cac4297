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

from slurm_health.records.decoding import from_json
from slurm_health.records.text import one_line
from slurm_health.system import journal, private_files

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
        data = private_files.read(handle, _NAME, most_bytes=_MOST_BYTES)
    return from_json(data, Elsewhere)
