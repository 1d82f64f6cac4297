# SPDX-License-Identifier: Apache-2.0
"""How long nodes and rounds may take, from what others took. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from slurm_health.preflight.session.phases import Phase
from slurm_health.preflight.session.state import CheckState, RoundState
from slurm_health.records.records import WorkersReady
from slurm_health.records.verdict import Outcome


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


def to_get_ready_s(limits: TimeLimits, state: CheckState) -> float:
    """Return how long a node may take to get its workers ready.

    Loading torch from a cold network filesystem can take minutes; once half of the nodes have done
    it, the others are measured against them.
    """
    alive = [node for node in state.agents.values() if not node.gone]
    took_s = [node.ready.start_ms / 1e3 for node in alive if node.ready]
    if not took_s or 2 * len(took_s) < len(alive):
        return limits.ready_s
    return min(limits.adaptive_factor * median(took_s) + limits.ready_extra_s, limits.ready_s)


def margin_s(limits: TimeLimits, ready: Sequence[WorkersReady]) -> float:
    """Return the margin of a round: what it took its nodes to load torch, within bounds."""
    return min(max(_start_s(ready), limits.least_margin_s), limits.most_margin_s)


def at_most_s(limits: TimeLimits, phase: Phase, ready: Sequence[WorkersReady]) -> float:
    """Return how long a round may take while nothing is known of how long it takes here."""
    allowed_s = limits.adaptive_factor * _start_s(ready) + margin_s(limits, ready)
    short_s = limits.patience * allowed_s
    blind_s = min(max(short_s, limits.round_deadline_s / 2), limits.round_deadline_s)
    return blind_s + limits.patience * phase.extra_s()


def end_of_s(
    limits: TimeLimits, current: RoundState, state: CheckState, round_margin_s: float
) -> float:
    """Return when the round in progress has taken too long, by what its groups took so far.

    `round_margin_s` is its margin: to compute it goes through all nodes.
    """
    took_ms = [*state.took_ms[current.record.phase], *current.took_ms]
    if not took_ms:
        return current.started_s + current.record.deadline_s
    allowed_s = limits.adaptive_factor * median(took_ms) / 1e3 + round_margin_s
    timed_out = any(r.outcome is Outcome.TIMED_OUT for results in state.ended for r in results)
    if 2 * current.reported < len(current.begun) and not timed_out:
        allowed_s *= limits.patience  # earlier rounds were quick, this one shows nothing
    elif "apart" in current.record.options:
        allowed_s *= limits.patience  # devices connect one by one and two by two first
    return current.started_s + min(allowed_s, current.record.deadline_s)


def _start_s(ready: Sequence[WorkersReady]) -> float:
    """Return how long these nodes typically took to load torch."""
    return median([one.start_ms for one in ready]) / 1e3 if ready else math.inf
