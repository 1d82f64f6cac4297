# SPDX-License-Identifier: Apache-2.0
"""Which nodes fail, from groups that passed or failed as a whole.

A group fails if any of its sources is bad. A bad source is dead, and then nearly always fails,
or flaky, and then passes now and then; a good group fails now and then as well, so that one
result never decides alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slurm_health.preflight.localize.belief_propagation import NONE, Floats, Graph, Ints, propagate
from slurm_health.preflight.localize.evidence import Bearing, Trial
from slurm_health.preflight.localize.fabric import Sources

_FAILS = np.array([0.002, 0.9, 0.999])  # probability to fail when well, flaky, dead
_TURNS, _TURNS_WITHOUT_PATHS = 12, 2  # at most, and of them at first
_SETTLED = 1e-7  # probabilities that change by less change no verdict
_NEVER = -60.0  # log odds
_FLAKY, _FLAKY_PRIOR_NODES = 0.3, 4.0  # share of the bad ones that are flaky, and its weight


def infer_hard(
    trials: Sequence[Trial], sources: Sources, odds: Floats, *, alone: bool = False
) -> Floats:
    """Return the probability of each variable to make its groups fail.

    `sources` holds a row per trial. A crash is a test of the crashed node alone. That a node by
    itself passed says nothing about its work with others, unless all are tested `alone`.
    """
    nodes = sources.nodes
    rows, failed = _tests(trials, sources.table, least=1 if alone else 2)
    if not len(rows):
        logit = odds.copy()
        logit[:nodes] += np.log(0.02)
        return 1 / (1 + np.exp(-logit))
    graph = Graph.of(rows, sources.variables)
    likelihood = np.log(np.where(failed, _FAILS[:, None], 1 - _FAILS[:, None]))[None]
    share, flaky, messages, bad = 0.02, _FLAKY, None, np.zeros(sources.variables)
    for turn in range(_TURNS):
        logit = odds.copy()
        if turn < _TURNS_WITHOUT_PATHS:  # a bad leaf looks like as many bad paths; it must win
            logit[nodes + sources.leaves :] = _NEVER
        logit[:nodes] += np.log(share / (1 - share))
        log_good, log_bad = -np.logaddexp(0, logit), -np.logaddexp(0, -logit)
        prior = np.stack([log_good, log_bad + np.log(flaky), log_bad + np.log(1 - flaky)])[None]
        beliefs = propagate(graph, likelihood, prior, sweeps=4, messages=messages)
        messages = beliefs.messages
        before, bad = bad, beliefs.states[0, 1:].sum(axis=0)
        if turn > _TURNS_WITHOUT_PATHS and float(np.abs(bad - before).max()) < _SETTLED:
            break
        unsteady = float(beliefs.states[0, 1, :nodes].sum()) + _FLAKY * _FLAKY_PRIOR_NODES
        flaky = unsteady / (float(bad[:nodes].sum()) + _FLAKY_PRIOR_NODES)
        share = min(max((0.05 + float(bad[:nodes].sum())) / (nodes + 1), 1e-6), 0.9)
    return bad


def _tests(
    trials: Sequence[Trial], sources: Ints, *, least: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the sources of each pass, failure and crash, and which of them failed.

    Of groups with fewer than `least` nodes only crashes count.
    """
    tested = [
        number
        for number, trial in enumerate(trials)
        if trial.bearing is not Bearing.UNKNOWN and len(trial.nodes) >= least
    ]
    crashed = [node for trial in trials for node in trial.crashed]
    alone = np.full((len(crashed), sources.shape[1]), NONE, dtype=np.int64)
    alone[:, 0] = crashed
    failed = [trials[number].bearing is Bearing.FAILED for number in tested]
    return (
        np.concatenate([sources[np.array(tested, dtype=np.int64)], alone]),
        np.array(failed + [True] * len(crashed), dtype=np.bool_),
    )
