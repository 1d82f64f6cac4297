# SPDX-License-Identifier: Apache-2.0
"""Slurm's own view of the job and its nodes: asked once, where it can know more than the script.

Many jobs may fail at the same moment, as those of an array that miss a file; slurmctld is then the
last that should hear of it.
"""

from __future__ import annotations

from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import SlurmView
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected

_LIMIT_S = 5.0


class SlurmWord:
    """The states of the job and of its nodes."""

    name = "slurm"
    data = SlurmView

    def is_enabled(self, job: EndedJob) -> Enabled:
        """It must be a job that has lost a node without being lost itself, or was ended."""
        if not _name(job) or not job.end.nodes:
            return Enabled("this is no job of Slurm's")
        if len(job.end.nodes) == 1 and not job.end.by_a_signal:
            return Enabled("not asked: the job has one node, and no signal ended it")
        return Enabled()

    def collect_data(self, job: EndedJob) -> SlurmView:
        """Ask for all nodes at once, and for the job where a signal ended it.

        Raises:
            NothingCollected: Slurm does not answer.
        """
        client = Client.for_hook(job.environ, limit_s=_LIMIT_S)
        try:
            nodes = client.nodes(job.end.nodes)
            states = client.job(_name(job)).states if job.end.by_a_signal else ()
        except SlurmError as err:
            raise NothingCollected(str(err)) from err
        return SlurmView(
            job_states=tuple(sorted(states)),
            node_states={name: node.state for name, node in nodes.items()},
        )


def _name(job: EndedJob) -> str:
    """Return the job as Slurm's commands call it; a task of an array never by its number alone."""
    array, task = (job.environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else job.environ.get("SLURM_JOB_ID", "")
