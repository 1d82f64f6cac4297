# SPDX-License-Identifier: Apache-2.0
"""From evidence to convictions: what is proven, what is still open, and who can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slurm_health.core import probe_catalog
from slurm_health.core.localize.belief_propagation import NONE, Floats, Ints
from slurm_health.core.localize.conviction import TRUST, Guilt, Metric, failing, slow
from slurm_health.core.localize.evidence import Bearing, Trial
from slurm_health.core.localize.fabric import Fabric, Sources, odds_of, sources_of
from slurm_health.core.localize.failures import infer_hard
from slurm_health.core.localize.pairing import Pair
from slurm_health.core.localize.settings import LocalizeSettings
from slurm_health.core.localize.slowness import Observations, infer

_LEAST_OF_A_KIND = 3  # fewer tests of a kind say nothing, there is nothing to compare them with
_KIND_TESTS = 24  # tests of one kind in one round that give the round its own baseline


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that was concluded from the results so far, by variable number."""

    trials: Sequence[Trial]
    fabric: Fabric
    sources: Sources
    bad: Floats  # probability to make groups fail
    metrics: tuple[Metric, ...]
    guilty: Mapping[int, tuple[Guilt, ...]]  # nodes, leaves and paths
    crashes: Mapping[int, tuple[int, ...]]  # node -> trials in which its own probe died
    silences: Mapping[int, tuple[int, ...]]
    passed: frozenset[int]  # nodes that were in a group that worked
    tested: frozenset[int]  # nodes about which any trial says anything
    uncontrolled: frozenset[int]  # slow, but for all that is known everybody was at the time
    risk: Floats = field(default_factory=lambda: np.zeros(0))

    def trusted(self, node: int) -> bool:
        """Tell whether the node passed a test and is believed to be well in every respect."""
        return node in self.passed and self.risk[node] <= TRUST and node not in self.guilty


def judge(
    trials: Sequence[Trial],
    fabric: Fabric,
    prior: Mapping[int, float],
    settings: LocalizeSettings,
) -> Findings:
    """Return what these trials prove and what they leave open."""
    sources = sources_of(trials, fabric)
    odds = odds_of(sources, prior)
    bad = infer_hard(trials, sources, odds)
    metrics = tuple(_metrics(trials, fabric, sources, odds, settings))
    crashes = _occurrences((index, trial.crashed) for index, trial in enumerate(trials))
    guilty = failing(trials, sources, bad, crashes, settings)
    slow_ones, uncontrolled = slow(trials, metrics, sources, guilty, settings)
    for variable, guilt in slow_ones.items():
        guilty[variable] = (*guilty.get(variable, ()), *guilt)
    risk = bad.copy()
    for metric in metrics:
        risk = np.maximum(risk, metric.found.beyond)
    passed = {node for t in trials if t.bearing is Bearing.PASSED for node in t.nodes}
    tested = {node for t in trials if t.bearing is not Bearing.UNKNOWN for node in t.nodes}
    return Findings(
        trials=trials,
        fabric=fabric,
        sources=sources,
        bad=bad,
        metrics=metrics,
        guilty=guilty,
        crashes=crashes,
        silences=_occurrences((index, trial.silent) for index, trial in enumerate(trials)),
        passed=frozenset(passed),
        tested=frozenset(tested | crashes.keys()),
        uncontrolled=uncontrolled - guilty.keys(),
        risk=risk,
    )


def _occurrences(mentions: Iterable[tuple[int, Sequence[int]]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for index, nodes in mentions:
        for node in nodes:
            found[node] = (*found.get(node, ()), index)
    return found


def _metrics(
    trials: Sequence[Trial],
    fabric: Fabric,
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
) -> Iterable[Metric]:
    """Infer each metric by itself: compute and network times are never added."""
    shared = {name for trial in trials for name in trial.shared_ms}
    for name in sorted(shared):
        rows = [
            (index, trial.shared_ms[name], sources.table[index], fabric.crosses(trial.nodes))
            for index, trial in enumerate(trials)
            if name in trial.shared_ms
        ]
        yield _metric(name, rows, trials, sources, odds, settings, shared=True)
    for name in sorted({name for trial in trials for name in trial.node_ms}):
        rows = [
            (index, ms, np.array([node], dtype=np.int64), False)
            for index, trial in enumerate(trials)
            for node, ms in sorted(trial.node_ms.get(name, {}).items())
        ]
        if rows:
            yield _metric(name, rows, trials, sources, odds, settings, shared=False)


def _metric(
    name: probe_catalog.Metric,
    rows: Sequence[tuple[int, float, Ints, bool]],
    trials: Sequence[Trial],
    sources: Sources,
    odds: Floats,
    settings: LocalizeSettings,
    *,
    shared: bool,
) -> Metric:
    floor = settings.network_floor if shared else settings.compute_floor
    trial = np.array([row[0] for row in rows], dtype=np.int64)
    rounds = np.array([trials[index].round_index for index in trial], dtype=np.int64)
    crossing = np.array([row[3] for row in rows], dtype=np.int64)
    kind = _kinds(rounds, crossing)
    kept = _comparable(kind)
    data = Observations(
        log_ms=np.log(np.array([row[1] for row in rows]))[kept],
        sources=np.stack([row[2] for row in rows])[kept],
        kind=np.unique(kind[kept], return_inverse=True)[1].reshape(-1).astype(np.int64),
        nodes=sources.nodes,
        variables=sources.variables,
        first_path=sources.nodes + sources.leaves,
        ceiling=_ceiling(name, settings),
    )
    found = infer(data, odds, floor)
    return Metric(
        name=name,
        shared=shared,
        floor=floor,
        data=data,
        trial=trial[kept],
        round=rounds[kept],
        found=found,
    )


def _kinds(rounds: Ints, crossing: Ints) -> Ints:
    """Return which observations share a baseline: inside or across leaves, per round if many.

    A round with few tests of a side shares the baseline of the last round that had many.
    """
    kind = np.full(len(rounds), -1, dtype=np.int64)
    kinds = 0
    for side in (0, 1):
        here = crossing == side
        own = [r for r in np.unique(rounds[here]) if (here & (rounds == r)).sum() >= _KIND_TESTS]
        for begin, end in pairwise([-1, *own[1:], int(rounds.max()) + 1]):
            chosen = here & (rounds >= begin) & (rounds < end)
            kind[chosen] = kinds
            kinds += 1
    _, kind = np.unique(kind, return_inverse=True)
    return kind.reshape(-1).astype(np.int64)


def _comparable(kind: Ints) -> npt.NDArray[np.bool_]:
    """Tell which observations have enough of their kind to be compared with."""
    counts = np.bincount(kind)
    return (counts[kind] >= _LEAST_OF_A_KIND) | (len(counts) == 1)


def _ceiling(name: probe_catalog.Metric, settings: LocalizeSettings) -> float:
    """Return the largest baseline that is believed, from what good hardware is known to take."""
    expected = settings.expected_ms.get(str(replace(name, part="")))
    return float("inf") if expected is None else float(np.log(expected * settings.expected_slack))


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
