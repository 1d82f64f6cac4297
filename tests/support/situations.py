# SPDX-License-Identifier: Apache-2.0
"""Jobs about which something is decided."""

from __future__ import annotations

from slurm_health.preflight.decide.decide import Case, decide, question
from slurm_health.preflight.decide.decision import Decision, StartQuestion
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.records import VerdictReached


def job_facts(
    *,
    requeues: int = 0,
    named: frozenset[str] = frozenset(),
    candidates: frozenset[str] | None = None,
    asked: int = 0,
    wait: str = "",
    may_drain: bool = True,
    hold_obstacle: str = "",
    held_for: frozenset[str] = frozenset(),
) -> JobFacts:
    """Return what is known of a job whose batch host is n1."""
    return JobFacts(
        job_id=12,
        batch_node="n1",
        requeues=requeues,
        named=named,
        candidates=candidates,
        partition="main",
        asked=asked,
        wait=wait,
        may_drain=may_drain,
        hold_obstacle=hold_obstacle,
        held_for=held_for,
    )


def decided(verdict: VerdictReached, policy: Policy, facts: JobFacts) -> Decision:
    """Return what is decided about a verdict, with the unwanted nodes that the policy makes."""
    return decide(Case.of(verdict, policy, facts))


def asked_about(verdict: VerdictReached, policy: Policy, facts: JobFacts) -> StartQuestion | None:
    """Return what Slurm is to be asked before that is decided."""
    return question(Case.of(verdict, policy, facts))
