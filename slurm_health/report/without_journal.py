# SPDX-License-Identifier: Apache-2.0
"""Why a job has no journal, as far as Slurm knows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from slurm_health.errors import SlurmError, UnknownJob
from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Job, JobId

# In every script that slurm-health submits.
_OURS = "-m slurm_health supervise"


def reason(job: JobId, environ: Mapping[str, str]) -> str:
    """Ask Slurm about a job without a journal; say nothing where Slurm cannot be asked."""
    client = Client(environ, patience_s=0)
    try:
        found = client.job(job)
    except UnknownJob:
        return f"Slurm knows no job {job}, or no longer."
    except SlurmError:
        return ""
    script = ""
    with contextlib.suppress(SlurmError):  # somebody else's, an interactive job's
        script = client.batch_script(job)
    return explain(found, script)


def explain(job: Job, script: str) -> str:
    """Say why a job that Slurm knows has no journal; `script` is empty where nobody may see it."""
    state = "+".join(sorted(job.states)).lower()
    if script and _OURS not in script:
        return f"it was not submitted with slurm-health sbatch, so nothing was checked ({state})."
    if job.pending:
        why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
        return f"it is pending{why}: its nodes are checked when it starts."
    output = job.value("StdOut")
    see = f" Its output says why: {output}" if output else ""
    if "RUNNING" in job.states:
        return f"it is running, and its check has not begun, or could not.{see}"
    return f"it ended before a check began ({state}).{see}"
