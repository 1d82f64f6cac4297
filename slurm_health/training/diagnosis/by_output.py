# SPDX-License-Identifier: Apache-2.0
"""Whether a training without a heartbeat hangs: its output stands still, and so do its processes.

Output alone decides nothing: a training may be silent and well. So it takes a longer silence than
heartbeats do, and no process of the job may work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import Patience, allowance_s
from slurm_health.training.diagnosis.seen import Standstill, still_works
from slurm_health.training.diagnosis.step_lines import StepLines
from slurm_health.training.diagnosis.watched import Looked, Watched, loading_ranks, waiting_ranks

# Against the times between looks at which lines had counted.
OUTPUT_PATIENCE = Patience(at_least_s=200.0, steps=10.0, pauses=2.0)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 600.0  # from one look at the processes to the next


class OutputProgress:
    """How a job's output files get on together. Its time is told."""

    def __init__(self, patience: Patience = OUTPUT_PATIENCE) -> None:
        self._patience = patience
        self._files: dict[str, StepLines] = {}
        self._look_again_s = 0.0
        self._pause_s = 0.0
        self.hung_s: float | None = None  # since when, once that was said

    def take(self, file: str, text: str, now_s: float, *, torn: bool = False) -> None:
        """Take in what was written to a file since the last look; `torn`: not all of it."""
        lines = self._files.setdefault(file, StepLines())
        if torn:
            lines.skip()
        lines.take(text, now_s)

    @property
    def latest(self) -> StepLines | None:
        """The file that counted last, None where none does."""
        counting = [each for each in self._files.values() if each.line]
        return max(counting, key=lambda each: each.last_s, default=None)

    def stalled_s(self, now_s: float) -> float:
        """Return since when no line counted, 0 where none ever did."""
        return self.latest.age_s(now_s) if self.latest else 0.0

    @property
    def allowance_s(self) -> float:
        """How long a pause would be usual."""
        paces = [each.pace for each in self._files.values() if each.line]
        return allowance_s(paces, self._patience)

    def suspect(self, now_s: float) -> bool:
        """Tell whether the processes are to be looked at: not before some time after a look."""
        late = self.stalled_s(now_s) >= self.allowance_s
        if not late:
            self._pause_s = 0.0
        return late and self.hung_s is None and now_s >= self._look_again_s

    def goes_on(self, now_s: float) -> float | None:
        """Return how long a training stood still that was said to hang, and goes on; else None."""
        if self.hung_s is None or self.stalled_s(now_s) >= self._patience.at_least_s:
            return None
        stalled_s = now_s - self.stalled_s(now_s) - self.hung_s
        self.hung_s = None
        return stalled_s

    def not_now(self, now_s: float) -> None:
        """Put off the next look: this one showed somebody at work, or nothing."""
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._look_again_s = now_s + self._pause_s

    def judge(
        self,
        watched: Watched,
        looked: Looked,
        nodes: Sequence[str],
        *,
        window_s: float,
        now_s: float,
    ) -> tuple[Standstill, FlightRecords] | str:
        """Return what was seen of the training, or why it does not hang so far.

        Args:
            watched: all that the monitors told,
            looked: what a closer look showed `window_s` before the last of it.
            nodes: those of the job.
            window_s: so long was between the two, seconds.
            now_s: the time.
        """
        stills = [
            looked.standstill(
                program,
                tuple(nodes),
                stalled_s=self.stalled_s(now_s),
                allowance_s=self.allowance_s,
                step=self.latest.step if self.latest else 0,
                window_s=window_s,
            )
            for program in watched.programs.values()
        ]
        reason = self._why_not(stills, now_s)
        if reason:
            self.not_now(now_s)
            return reason
        self.hung_s = now_s - self.stalled_s(now_s)
        # A job may run more than its training; that is what has the most ranks.
        return max(stills, key=lambda each: len(each[0].ranks))

    def _why_not(self, stills: Iterable[tuple[Standstill, FlightRecords]], now_s: float) -> str:
        if self.stalled_s(now_s) < self.allowance_s:
            return "it goes on"
        reasons = [
            still_works(
                still,
                waiting_ranks(still.ranks, flights),
                self._patience,
                loading=loading_ranks(still.ranks),
            )
            for still, flights in stills
        ]
        if not reasons:
            return "no process of the training can be seen"
        return next(filter(None, reasons), "")
