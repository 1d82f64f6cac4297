# SPDX-License-Identifier: Apache-2.0
"""Windows of time in which the ranks of each training are compared, with each other and before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slurm_health.training.diagnosis.pulse import Program
from slurm_health.training.diagnosis.slow_steps import Longer, RankSteps, SlowSteps
from slurm_health.training.diagnosis.stragglers import SlowRank, Stragglers
from slurm_health.training.diagnosis.uneven import Uneven, Unevenness


@dataclass
class _Compared:
    stragglers: Stragglers = field(default_factory=Stragglers)
    unevenness: Unevenness = field(default_factory=Unevenness)
    slow_steps: SlowSteps = field(default_factory=SlowSteps)


class Comparison:
    """Closes windows of time; reports once what is slow or uneven in one after another."""

    def __init__(self) -> None:
        self._programs: dict[str, _Compared] = {}

    def window(self, programs: Iterable[Program]) -> list[tuple[SlowRank, float]]:
        """Close a window; return the ranks newly known to be slower, and how many times."""
        slow: list[tuple[SlowRank, float]] = []
        for program in programs:
            samples = {sample.rank: sample for sample in program.samples if not sample.gone}
            for slower in self._of(program).stragglers.window(samples):
                sample = samples[slower.rank]
                rank = SlowRank(
                    rank=slower.rank,
                    node=sample.node,
                    spent=slower.spent,
                    usual=slower.usual,
                    tells_loading=sample.batches > 0,
                )
                slow.append((rank, slower.ratio))
        return slow

    def uneven(self, programs: Iterable[Program]) -> list[Uneven]:
        """Return what is newly known to be uneven, by the windows so far."""
        return [
            uneven
            for program in programs
            for compared in [self._of(program)]
            for uneven in compared.unevenness.newly(
                tuple(compared.stragglers.windows),
                compared.stragglers.crowd,
                {sample.rank: sample.node for sample in program.samples},
            )
        ]

    def longer(self, programs: Iterable[Program]) -> list[Longer]:
        """Close a window; return by how much steps take longer than before, if that is new."""
        longer = []
        for program in programs:
            steps = {
                rank: RankSteps(
                    steps=last.sample.steps,
                    last_s=last.at_s - last.sample.age_s,
                    own_s=last.sample.own_s,
                    own_steps=last.sample.own_steps,
                )
                for rank, last in program.ranks.items()
                if not last.gone
            }
            if (now := self._of(program).slow_steps.window(steps)) is not None:
                longer.append(now)
        return longer

    def _of(self, program: Program) -> _Compared:
        return self._programs.setdefault(program.name, _Compared())
