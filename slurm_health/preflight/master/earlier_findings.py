# SPDX-License-Identifier: Apache-2.0
"""What the journals of a job's earlier checks and failures found: read for the next check."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from slurm_health.preflight.localize.suspicion import prior_of
from slurm_health.records.errors import JournalError
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.system import journal

log = logging.getLogger(__name__)

_MOST_RUNS = 20  # the last ones of a job; few have as many


def prior(root: Path, cluster: str, job_id: int, user_id: int) -> dict[str, float]:
    """Return how likely nodes are to be bad by the earlier runs of a job; empty without any."""
    try:
        name = journal.name_of(root, cluster, str(job_id), user_id, quick=True)
        runs = journal.runs_of(root, cluster, name, owner=user_id)[-_MOST_RUNS:]
    except OSError as err:
        log.warning("what was found before is left out of account: %s", err.strerror or err)
        return {}
    return prior_of(found for run in runs for found in _found(run))


def _found(run: Path) -> Iterator[VerdictReached | Diagnosed]:
    """Yield what one run found: by its check, then by the failures of the script after it."""
    for writer in (journal.MASTER, journal.POST_MORTEM):
        with contextlib.suppress(JournalError):  # what cannot be read is no suspicion
            for entry in journal.read_all(run, writer):
                if isinstance(entry.record, VerdictReached | Diagnosed):
                    yield entry.record
