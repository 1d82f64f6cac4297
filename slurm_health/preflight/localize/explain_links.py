# SPDX-License-Identifier: Apache-2.0
"""Findings about links in words: paths between leaves or two nodes, and the uplinks of leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypedDict

from slurm_health.preflight.localize.findings import LonePair, lone_pairs
from slurm_health.preflight.localize.wording import (
    Wording,
    compared_text,
    how_text,
    ms_text,
    times_of,
)
from slurm_health.records.nodeset import fold
from slurm_health.records.verdict import Level, LinkVerdict


class _FabricWords(TypedDict):
    """What a verdict about a leaf and one about a path have in common."""

    level: Level
    slowdown: float
    probability: float
    reason: str
    evidence: tuple[str, ...]


class LinkWords(Wording):
    """Finds the words for what is wrong between nodes."""

    def paths(self) -> Iterable[LinkVerdict]:
        """Return the pairs of leaves, or of nodes, whose connection alone is bad."""
        findings = self.findings
        first = findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if v >= first):
            low, high = findings.sources.paths[variable - first]
            ends = (findings.fabric.leaves[low], findings.fabric.leaves[high])
            found = self._fabric_guilt(variable, f"between {ends[0]} and {ends[1]}")
            yield LinkVerdict(ends=ends, **found)
        for pair in lone_pairs(findings):
            verdict = self._pair(pair)
            if verdict is not None:
                yield verdict

    def _pair(self, pair: LonePair) -> LinkVerdict | None:
        """Return the verdict about two nodes that are well with everybody but each other."""
        if pair.level is None:
            return None
        tests = len(pair.trials)
        how = "failed" if pair.failed else "was slow"
        times = f"in {tests} of {tests} tests" if pair.proven else "once, and was not tested again"
        return LinkVerdict(
            ends=(self.names[pair.nodes[0]], self.names[pair.nodes[1]]),
            level=pair.level,
            slowdown=math.exp(pair.excess) if pair.slow else 1.0,
            probability=0.99 if pair.proven else 0.5,
            reason=f"{self.workload} {how} {times}; both nodes are fine with other partners",
            evidence=tuple(self._fabric_line(index) for index in pair.trials),
        )

    def leaves(self) -> Iterable[LinkVerdict]:
        """Return the leaves whose uplink is bad."""
        findings = self.findings
        first, end = findings.sources.nodes, findings.sources.nodes + findings.sources.leaves
        for variable in sorted(v for v in findings.guilty if first <= v < end):
            name, where = self._leaf(variable - first)
            yield LinkVerdict(ends=(name,), **self._fabric_guilt(variable, where))

    def _leaf(self, number: int) -> tuple[str, str]:
        """Return a leaf's name, its nodes where no topology names it, and what its uplink joins."""
        fabric = self.findings.fabric
        if number < len(fabric.leaves):
            leaf = fabric.leaves[number]
            return leaf, f"across the uplink of {leaf}"
        members = fabric.found[number - len(fabric.leaves)]
        nodes = fold(self.names[node] for node in members)
        return nodes, f"between {nodes}, which are well with one another, and other nodes"

    def _fabric_guilt(self, variable: int, where: str) -> _FabricWords:
        guilt = self.findings.guilty[variable][0]
        metric = guilt.metric
        if metric is None:
            trials = [self.findings.trials[index] for index in guilt.tests]
            reason = f"no {self.workload} {where} in {len(trials)} tests ({how_text(trials)})"
            numbers = guilt.tests
        else:
            mine, base = times_of(metric, guilt.tests)
            reason = (
                f"{metric.name} slow {where} in {len(guilt.tests)} tests"
                f" ({ms_text(mine)}, {compared_text(metric, base)} {ms_text(base)})"
            )
            numbers = tuple(int(metric.trial[test]) for test in guilt.tests)
        return _FabricWords(
            level=Level.FAULTY if metric is None else Level.SLOW,
            slowdown=1.0 if metric is None else math.exp(float(metric.found.effect[variable])),
            probability=guilt.probability,
            reason=reason,
            evidence=tuple(self._fabric_line(index) for index in numbers),
        )

    def _fabric_line(self, index: int) -> str:
        trial = self.findings.trials[index]
        return self.line(trial.nodes[0], trial, also=self.names[trial.nodes[0]])
