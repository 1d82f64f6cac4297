# SPDX-License-Identifier: Apache-2.0
"""Pairs that went badly although both ends, and all switches between them, are well."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurm_health.core.localize_bp import NONE
from slurm_health.core.localize_evidence import Bearing
from slurm_health.core.localize_judge import Findings
from slurm_health.core.plan import Pair

_STRIKING = float(np.log(2.0))  # a single slow test is worth another round from this excess on
_BEYOND_NOISE = 4.0  # deviations
_TESTS, _TESTS_IF_LITTLE = 2, 4  # that prove a pair bad; congestion may strike a few in a row


@dataclass(frozen=True, kw_only=True)
class LonePair:
    """The tests of one such pair; `failed` and `slow` are the bad ones among `trials`."""

    nodes: Pair
    trials: tuple[int, ...]
    failed: tuple[int, ...]
    slow: tuple[int, ...]
    excess: float  # the least log-excess of the slow ones

    @property
    def proven(self) -> bool:
        """Tell whether the pair was bad whenever it was tested, often enough."""
        needed = _TESTS if self.failed or self.excess > _STRIKING else _TESTS_IF_LITTLE
        return self._always_bad and len(self.trials) >= needed

    @property
    def unproven(self) -> bool:
        """Tell whether another test of the pair could prove it bad."""
        return self._always_bad and not self.proven

    @property
    def striking(self) -> bool:
        """Tell whether the pair was tested once, and so badly that it is worth a round."""
        return len(self.trials) == 1 and (bool(self.failed) or self.excess > _STRIKING)

    @property
    def _always_bad(self) -> bool:
        return len(self.failed) + len(self.slow) == len(self.trials)


def lone_pairs(findings: Findings) -> list[LonePair]:
    """Return the pairs that went badly at least once and whose parts are all well."""
    excess = _slow_trials(findings)
    suspects = set(excess) | {
        index for index, trial in enumerate(findings.trials) if trial.bearing is Bearing.FAILED
    }
    bad_pairs = {
        findings.trials[index].nodes for index in suspects if _parts_are_well(findings, index)
    }
    history: dict[tuple[int, ...], list[int]] = {}
    for index, trial in enumerate(findings.trials):
        if trial.nodes in bad_pairs and trial.bearing is not Bearing.UNKNOWN:
            history.setdefault(trial.nodes, []).append(index)
    return [
        LonePair(
            nodes=(nodes[0], nodes[1]),
            trials=tuple(trials),
            failed=tuple(i for i in trials if findings.trials[i].bearing is Bearing.FAILED),
            slow=tuple(i for i in trials if i in excess),
            excess=min((excess[i] for i in trials if i in excess), default=0.0),
        )
        for nodes, trials in sorted(history.items())
        if len(nodes) == 2
    ]


def _parts_are_well(findings: Findings, index: int) -> bool:
    """Tell whether everything that took part in a trial is believed to be well."""
    nodes = findings.trials[index].nodes
    switches = [
        int(source)
        for source in findings.sources.table[index]
        if source != NONE and source >= findings.sources.nodes
    ]
    return all(findings.trusted(node) for node in nodes) and not any(
        switch in findings.guilty for switch in switches
    )


def _slow_trials(findings: Findings) -> dict[int, float]:
    """Return the log-excess of trials beyond the floor and beyond the noise."""
    excess: dict[int, float] = {}
    for metric in findings.metrics:
        if metric.shared:
            limit = max(float(np.log1p(metric.floor)), _BEYOND_NOISE * metric.found.noise)
            for row in np.flatnonzero(metric.found.excess > limit):
                index = int(metric.trial[row])
                excess[index] = max(excess.get(index, 0.0), float(metric.found.excess[row]))
    return excess
