# SPDX-License-Identifier: Apache-2.0
"""What happens between jobs: sweeps of idle nodes, and the look at lemons once a day.

Real are whom a sweep takes with whom (`fleet.sweep.choice`) and who is a lemon (`fleet.standing`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from benchmarks.year.care import Care, Cluster
from benchmarks.year.checks import Checks
from benchmarks.year.jobs import DAY_S, Job
from benchmarks.year.policies import Lemons, Rule, Sweep
from benchmarks.year.rules import shown
from slurm_health.fleet.standing.standing import (
    WINDOW_DAYS,
    JobOnNode,
    NodeRecord,
    standings,
)
from slurm_health.fleet.sweep import choice
from slurm_health.records.standings import Reliability

TURN_S = 3600.0
CHECK_S, STRESS_S = 180.0, 900.0
# Meta took out 40 nodes of 3,000 (arXiv:2410.21680): this share is above the cut, from three times.
META_CUT, META_LEAST = 0.013, 3
# A lemon's repair takes as long as the 90 % point of the trace's repairs.
RENEWAL_S = 13.7 * DAY_S
_LEAST_SPOILED = 3  # no node is a lemon by fewer (fleet.standing), so no look is needed


class Upkeep:
    """Sweeps and lemons of one year."""

    def __init__(self, cluster: Cluster, care: Care, checks: Checks) -> None:
        policy, clock = cluster.policy, cluster.clock
        self._policy, self._care, self._checks = policy, care, checks
        self._clock, self._pool, self._tally = clock, cluster.pool, cluster.tally
        self._rng = random.Random(f"upkeep {cluster.seed}")
        nodes = len(care.nodes)
        self._checked_s = [0.0] * nodes
        self._meetings: dict[frozenset[str], int] = {}
        self._in_checks = 0
        self._days: deque[np.ndarray] = deque([np.zeros(nodes, dtype=np.int64)], maxlen=WINDOW_DAYS)
        self._spoiled: dict[int, list[JobOnNode]] = {}
        if policy.sweep is not None:
            clock.after(TURN_S, lambda: self._turn(policy.sweep or Sweep()))
        clock.after(DAY_S, self._daily)

    # --- sweeps ----------------------------------------------------------------------------

    def started(self, nodes: Sequence[int]) -> None:
        """Note that a job has these nodes, and perhaps checks them."""
        self._days[-1][nodes] += 1
        if self._policy.sweep is not None and self._policy.rule is Rule.OURS:
            for node in nodes:
                self._checked_s[node] = self._clock.now_s

    def _turn(self, sweep: Sweep) -> None:
        now_s = self._clock.now_s
        due = {n for n in self._pool.free if self._is_due(n, sweep, now_s)}
        if due:
            idle = {str(node): self._checked_s[node] for node in self._pool.free}
            room = choice.at_once(len(self._care.nodes), sweep.share) - self._in_checks
            for group in choice.groups(
                idle, self._meetings, due=set(map(str, due)), size=sweep.size, room=room
            ):
                self._submit(sweep, tuple(map(int, group)))
        self._clock.after(TURN_S, lambda: self._turn(sweep))

    def _is_due(self, node: int, sweep: Sweep, now_s: float) -> bool:
        every_d, left_d = sweep.every_d, (self._care.nodes[node].probation_until_s - now_s) / DAY_S
        if sweep.probation_d is not None and left_d > 0:
            every_d = probation_every_d(sweep, left_d, self._policy.probation_d)
        return self._checked_s[node] < now_s - every_d * DAY_S or self._checked_s[node] == 0.0

    def _submit(self, sweep: Sweep, group: tuple[int, ...]) -> None:
        for pair in combinations(map(str, group), 2):
            key = frozenset(pair)
            self._meetings[key] = self._meetings.get(key, 0) + 1
        took_s = STRESS_S if sweep.stress else CHECK_S
        begun_s = self._clock.now_s
        self._in_checks += len(group)
        self._clock.after(took_s, lambda: self._swept(sweep, group, begun_s))

    def _swept(self, sweep: Sweep, group: tuple[int, ...], begun_s: float) -> None:
        """Take in what a check found, if no job took one of its nodes meanwhile."""
        self._in_checks -= len(group)
        self._tally.swept_s += len(group) * (self._clock.now_s - begun_s)
        if any(node not in self._pool.free for node in group):
            return
        defects, test = self._care.defects, "stress" if sweep.stress else "check"
        for node in group:
            self._checked_s[node] = self._clock.now_s
        bad = [node for node in group if node in defects and self._care.shows(node, test)]
        if not bad:
            return
        bad.sort(key=lambda node: shown(defects[node]))
        outcome = self._checks.of(len(group), [shown(defects[node]) for node in bad], self._rng)
        for node, said in zip(bad, outcome.bad, strict=True):
            if said is not None:
                self._spoil(node, f"sweep {begun_s:.0f}", 1, said.level.value)
                self._care.accused(node, job=2, uid=1, slow=said.level.value == "slow")
                self._care.found_by_sweep(node)

    # --- lemons ----------------------------------------------------------------------------

    def spoiled(self, node: int, job: Job, signal: str) -> None:
        """Note that a node spoiled a job."""
        self._spoil(node, f"{job.slot}.{job.number}", job.uid, signal)

    def _spoil(self, node: int, job: str, uid: int, signal: str) -> None:
        of_node = self._spoiled.setdefault(node, [])
        if all(each.job != job for each in of_node):
            seen = JobOnNode(job=job, time_s=self._clock.now_s, uid=uid, signals=(signal,))
            of_node.append(seen)

    def _daily(self) -> None:
        self._forget()
        if self._policy.lemons is Lemons.OURS:
            self._our_lemons()
        elif self._policy.lemons is Lemons.META:
            self._worst()
        self._days.append(np.zeros(len(self._care.nodes), dtype=np.int64))
        self._clock.after(DAY_S, self._daily)

    def _forget(self) -> None:
        oldest_s = self._clock.now_s - WINDOW_DAYS * DAY_S
        for node, seen in list(self._spoiled.items()):
            self._spoiled[node] = [each for each in seen if each.time_s >= oldest_s]
            if not self._spoiled[node]:
                del self._spoiled[node]

    def _our_lemons(self) -> None:
        if all(len(seen) < _LEAST_SPOILED for seen in self._spoiled.values()):
            return
        counts = np.sum(self._days, axis=0).tolist()
        records = [
            NodeRecord(
                node=str(node),
                jobs=max(jobs, len(self._spoiled.get(node, ()))),
                users=2,
                spoiled=tuple(self._spoiled.get(node, ())),
            )
            for node, jobs in enumerate(counts)
        ]
        for each in standings(records):
            if each.level is not Reliability.LEMON:
                break  # the worst come first
            self._renew(int(each.node))

    def _worst(self) -> None:
        """Take out the nodes with the most outages of the window, above the cut."""
        most = max(1, int(META_CUT * len(self._care.nodes)))
        worst = sorted(self._spoiled, key=lambda node: (-len(self._spoiled[node]), node))[:most]
        for node in worst:
            if len(self._spoiled[node]) >= META_LEAST:
                self._renew(node)

    def _renew(self, node: int) -> None:
        self._care.renew(node, RENEWAL_S)
        if self._care.nodes[node].out == "lemon":
            self._spoiled.pop(node, None)

    def outage(self, node: int) -> None:
        """Note that a node left the pool, which is what Meta's cut counts."""
        if self._policy.lemons is Lemons.META:
            self._spoil(node, f"outage {self._clock.now_s:.0f}", 1, "outage")


def probation_every_d(sweep: Sweep, left_d: float, probation_d: float) -> float:
    """Return how many days lie between tests, with so many days of the probation left."""
    assert sweep.probation_d is not None
    passed = max(0.0, 1 - left_d / probation_d)
    times: float = (sweep.every_d / sweep.probation_d) ** passed
    return sweep.probation_d * times
