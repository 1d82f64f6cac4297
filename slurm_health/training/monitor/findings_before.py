# SPDX-License-Identifier: Apache-2.0
"""What the monitor recorded while the script ran."""

from __future__ import annotations

from slurm_health.records.errors import JournalError
from slurm_health.records.records import Action, ActionDone, ActionIntended
from slurm_health.records.script_records import (
    Diagnosed,
    HangFound,
    HangOver,
    SlowdownFound,
    StragglerFound,
)
from slurm_health.system import journal
from slurm_health.training.diagnosis.collected import MonitorSaw
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected


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
        cancels = False
        try:
            for entry in journal.read_all(job.run_directory, journal.MONITOR):
                if entry.time_s < began_s:
                    continue
                if isinstance(entry.record, HangFound):
                    hang = entry.record
                elif isinstance(entry.record, HangOver):
                    hang = None
                elif isinstance(entry.record, ActionIntended | ActionDone):
                    cancels = entry.record.action is Action.CANCEL and not isinstance(
                        entry.record, ActionDone
                    )
                elif isinstance(entry.record, StragglerFound | SlowdownFound):
                    slow += [entry.record.found] if entry.record.found else []
        except JournalError as err:
            raise NothingCollected(str(err)) from err
        if hang is None and not slow:
            raise NothingCollected("the monitor saw no hang, and nothing that was slow")
        return MonitorSaw(hang=hang, cancels=cancels, slow=tuple(slow))
