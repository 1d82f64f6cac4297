# SPDX-License-Identifier: Apache-2.0
"""What Slurm and the monitor say of the job that has failed.

Many jobs may fail at the same moment, as those of an array that miss a file, and slurmctld is then
the last that should hear of it: it is asked once, where it can know more than the script.
"""

from __future__ import annotations

from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.script_records import (
    Diagnosed,
    HangFound,
    HangOver,
    SlowdownFound,
    StragglerFound,
)
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import MonitorSaw, SlurmView
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected

_SLURM_S = 5.0


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
        """Ask for all nodes at once, and for the job: its state counts where a signal ended it.

        Raises:
            NothingCollected: Slurm does not answer.
        """
        client = Client.for_hook(job.environ, limit_s=_SLURM_S)
        try:
            nodes = client.nodes(job.end.nodes)
            asked = client.job(_name(job))
        except SlurmError as err:
            raise NothingCollected(str(err)) from err
        return SlurmView(
            job_states=tuple(sorted(asked.states)) if job.end.by_a_signal else (),
            node_states={name: node.state for name, node in nodes.items()},
            required=asked.required,
        )


def _name(job: EndedJob) -> str:
    """Return the job as Slurm's commands call it; a task of an array never by its number alone."""
    array, task = (job.environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else job.environ.get("SLURM_JOB_ID", "")


class MonitorFindings:
    """A hang that was not over when the script ended, and what was slow before."""

    name = "monitor"
    data = MonitorSaw

    def is_enabled(self, job: EndedJob) -> Enabled:
        """The job must have a journal."""
        return Enabled() if job.run_directory else Enabled("the job has no journal")

    def collect_data(self, job: EndedJob) -> MonitorSaw:
        """Read what was recorded since the script began: by this node's clock, as its end is.

        Raises:
            NothingCollected: the monitor recorded nothing, or that cannot be read.
        """
        assert job.run_directory is not None
        began_s = job.ended_s - job.duration_s
        hang: HangFound | None = None
        slow: list[Diagnosed] = []
        ended_by: Action | None = None
        try:
            for entry in journal.read_all(job.run_directory, journal.MONITOR):
                if entry.time_s < began_s:
                    continue
                if isinstance(entry.record, HangFound):
                    hang = entry.record
                elif isinstance(entry.record, HangOver):
                    hang = None
                elif isinstance(entry.record, ActionIntended | ActionDone):
                    intended = isinstance(entry.record, ActionIntended)
                    ended_by = entry.record.action if intended else None
                elif isinstance(entry.record, StragglerFound | SlowdownFound):
                    slow += [entry.record.found] if entry.record.found else []
        except JournalError as err:
            raise NothingCollected(str(err)) from err
        if hang is None and not slow:
            raise NothingCollected("the monitor saw no hang, and nothing that was slow")
        return MonitorSaw(
            hang=hang,
            cancels=ended_by is Action.CANCEL,
            ends_script=ended_by is Action.END_SCRIPT,
            slow=tuple(slow),
        )
