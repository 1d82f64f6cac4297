# SPDX-License-Identifier: Apache-2.0
"""How long nodes and rounds may take, from what others took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slurm_health.preflight.session.phases import Phase
from slurm_health.preflight.session.round_state import RoundState
from slurm_health.preflight.session.run_state import RunState
from slurm_health.records.records import WorkersReady


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """How long the session waits. Every wait is measured from a record of the master's.

    A round's deadline adapts once half of its groups have reported: `adaptive_factor` times the
    median of what groups took so far, plus a margin. Before that it is `patience` times as long.
    The margin is what it took the nodes to load torch, from `least_margin_s` to `most_margin_s`:
    that shows how busy these machines are before any round does.

    While nothing was measured at all, that start stands in for what groups take: a round of short
    probes may take `round_deadline_s`, or less than that, down to half of it, where it was quick;
    `patience` times what the phase's longer probes take comes on top. A run in which a group was
    stopped by a deadline before has no such patience again: whatever hung hangs in the next group.

    Likewise a node may take `ready_s` to get ready, until half of the nodes have shown how long it
    takes. It is not given up then while others still get ready, until for `next_ready_s` none has:
    to start thousands of agents, or hundreds on one machine, takes longer than torch to load.
    `start_s` is for the first agent of all to show up.
    """

    start_s: float = 60.0
    ready_s: float = 180.0
    ready_extra_s: float = 20.0  # an agent looks for the journal for 15 s of it
    next_ready_s: float = 10.0
    round_deadline_s: float = 60.0
    adaptive_factor: float = 4.0
    least_margin_s: float = 2.0
    most_margin_s: float = 6.0
    patience: float = 2.5
    abort_grace_s: float = 5.0
    settle_s: float = 0.3
    launches_per_node: int = 3
    failed_starts_per_node: int = 2


class Deadlines:
    """The deadlines of one run; `state` is what is known of it."""

    def __init__(self, limits: TimeLimits, state: RunState) -> None:
        self._limits = limits
        self._state = state
        self._margins_s: dict[int, float] = {}  # of the round in progress

    def to_get_ready_s(self) -> float:
        """Return how long a node may take to get its workers ready.

        Loading torch from a cold network filesystem can take minutes; once half of the nodes
        have done it, the others are measured against them.
        """
        limits = self._limits
        alive = [node for node in self._state.agents.values() if not node.gone]
        took_s = [node.ready.start_ms / 1e3 for node in alive if node.ready]
        if not took_s or 2 * len(took_s) < len(alive):
            return limits.ready_s
        return min(limits.adaptive_factor * median(took_s) + limits.ready_extra_s, limits.ready_s)

    def at_most_s(self, phase: Phase, nodes: Sequence[str]) -> float:
        """Return how long a round may take while nothing is known of how long it takes here."""
        ready = self._state.ready(nodes)
        extra_s = phase.extra_s()
        limits = self._limits
        allowed_s = limits.adaptive_factor * _start_s(ready) + self._margin_s(ready)
        short_s = limits.patience * allowed_s
        blind_s = min(max(short_s, limits.round_deadline_s / 2), limits.round_deadline_s)
        return blind_s + limits.patience * extra_s

    def end_of_s(self, current: RoundState) -> float:
        """Return when the round in progress has taken too long, by what its groups took so far."""
        limits, measured_ms = self._limits, self._state.measured_ms(current.record.phase)
        if not measured_ms:
            return current.started_s + current.record.deadline_s
        margin_s = self._margin_of_round_s(current)
        allowed_s = limits.adaptive_factor * median(measured_ms) / 1e3 + margin_s
        if 2 * current.reported < current.running and not self._state.has_timed_out():
            allowed_s *= limits.patience  # earlier rounds were quick, this one shows nothing
        elif "apart" in current.record.options:
            allowed_s *= limits.patience  # devices connect one by one and two by two first
        return current.started_s + min(allowed_s, current.record.deadline_s)

    def _margin_of_round_s(self, current: RoundState) -> float:
        """Return the margin as it was when the round began: to find it goes through all nodes."""
        index = current.record.round
        if index not in self._margins_s:
            members = [node for group in current.groups for node in group]
            self._margins_s = {index: self._margin_s(self._state.ready(members))}
        return self._margins_s[index]

    def _margin_s(self, ready: Sequence[WorkersReady]) -> float:
        limits = self._limits
        return min(max(_start_s(ready), limits.least_margin_s), limits.most_margin_s)


def _start_s(ready: Sequence[WorkersReady]) -> float:
    """Return how long these nodes typically took to load torch."""
    return median([each.start_ms for each in ready]) / 1e3 if ready else math.inf
