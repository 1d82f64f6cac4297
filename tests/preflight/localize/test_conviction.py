# SPDX-License-Identifier: Apache-2.0
"""What convicts a node beyond a high probability; suspects before the first round."""

from __future__ import annotations

import numpy as np
import pytest

from slurm_health.preflight.localize import conviction
from slurm_health.preflight.localize.evidence import Bearing, Sources, Trial
from slurm_health.preflight.localize.metrics import MetricEvidence
from slurm_health.preflight.localize.settings import LocalizeSettings
from slurm_health.preflight.localize.slowness import Observations, Slowness
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.verdict import Outcome

_NODES, _ROUNDS = 8, 6
_SPREAD = 0.05


def _tested(victim_excess: list[float]) -> tuple[list[Trial], MetricEvidence, Sources]:
    """Return rounds in which each node is tested alone, and only the first is slow."""
    trials = [
        Trial(
            round_index=number // _NODES,
            nodes=(number % _NODES,),
            outcome=Outcome.MEASURED,
            bearing=Bearing.PASSED,
        )
        for number in range(_NODES * _ROUNDS)
    ]
    count = len(trials)
    table = np.arange(count).reshape(count, 1) % _NODES
    excess = np.where(table[:, 0] == 0, np.repeat(victim_excess, _NODES), 0.0)
    metric = MetricEvidence(
        name=Metric(probe="matmul"),
        shared=False,
        floor=0.12,
        spread=_SPREAD,
        floors=np.full(count, 0.12),
        data=Observations(
            log_ms=excess,
            sources=table,
            kind=np.zeros(count, dtype=int),
            nodes=_NODES,
            variables=_NODES,
            first_path=_NODES,
        ),
        trial=np.arange(count),
        round=np.arange(count) // _NODES,
        slowness=Slowness(
            slow=np.array([1.0] + [0.0] * (_NODES - 1)),
            effect=np.array([0.15] + [0.0] * (_NODES - 1)),
            beyond=np.array([1.0] + [0.0] * (_NODES - 1)),
            others=np.ones((count, 1)),
            excess=excess,
            baseline=np.zeros(1),
            noise=0.01,
        ),
    )
    return trials, metric, Sources(table=table, paths=(), nodes=_NODES, leaves=0)


@pytest.mark.parametrize(
    ("victim_excess", "convicted"),
    [
        ([0.15] * 6, []),  # three deviations of what devices differ by: one of eight may be there
        ([0.15] * 4 + [0.35] * 2, []),  # two spikes prove no more
        ([0.25] * 6, [0]),
    ],
)
def test_a_spike_in_a_nodes_tests_makes_it_no_further_out_than_it_is(
    victim_excess: list[float], convicted: list[int]
) -> None:
    trials, metric, sources = _tested(victim_excess)

    found, _ = conviction.slow(trials, [metric], sources, {}, frozenset(), LocalizeSettings())

    assert list(found) == convicted
