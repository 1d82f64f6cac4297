# SPDX-License-Identifier: Apache-2.0
"""What the user chose for slow nodes, for doubt, and for a job that was moved often enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_health.preflight.decide.decide import decide_unasked, unwanted
from slurm_health.preflight.decide.decision import PROVEN_PROBABILITY, Decision, LeaveAlone
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.situations import decided, job_facts

NODES = ("n1", "n2", "n3", "n4", "n5")


def verdict(
    *, probability: float = 1.0, evidence: int = 2, nodes: int = 4, **levels: Level
) -> VerdictReached:
    return VerdictReached(
        nodes=[
            NodeVerdict(
                node=node,
                level=levels.get(node, Level.HEALTHY),
                component="compute",
                reason="matmul 2.1 times slower",
                probability=probability,
                evidence=tuple(f"r{number}" for number in range(evidence)),
            )
            for node in NODES[:nodes]
        ]
    )


def kinds(decision: Decision) -> str:
    before = [*decision.drains, *([decision.shrink] if decision.shrink else [])]
    return " ".join([*(type(each).__name__ for each in before), decision.ending.disposition])


FAULTY = verdict(n2=Level.FAULTY)
SLOW = verdict(n2=Level.SLOW)
DOUBT = verdict(n2=Level.INCONCLUSIVE)


# --- slow nodes ----------------------------------------------------------------------------------


ALONE = Policy()
SPARE = Policy(nodes_wanted=3, nodes_needed=3)
FEWER = Policy(nodes_wanted=4, nodes_needed=3)
WAITS = job_facts(wait="it would have to wait for 1 other node")


@pytest.mark.parametrize(
    ("choice", "with_spare", "on_fewer", "others_free", "would_wait"),
    [
        (OnStraggler.EXCLUDE, "Shrink proceed", "Shrink proceed", "requeue", "proceed"),
        (OnStraggler.REQUEUE, "Shrink proceed", "requeue", "requeue", "requeue"),
        (
            OnStraggler.DRAIN,
            "Drain Shrink proceed",
            "Drain Shrink proceed",
            "Drain requeue",
            "Drain requeue",
        ),
        (OnStraggler.REPORT, "Shrink proceed", "proceed", "proceed", "proceed"),
    ],
)
def test_a_slow_node_causes_what_the_table_of_the_documentation_says(
    choice: OnStraggler, with_spare: str, on_fewer: str, others_free: str, would_wait: str
) -> None:
    """The table is in docs/howto/slow-and-undecided-nodes.md."""

    def told(known: JobFacts, policy: Policy = ALONE) -> str:
        return kinds(decided(SLOW, replace(policy, on_straggler=choice), known))

    assert told(WAITS, SPARE) == with_spare
    assert told(WAITS, FEWER) == on_fewer
    assert told(job_facts(wait="")) == others_free
    assert told(WAITS) == would_wait


@pytest.mark.parametrize(
    ("probability", "evidence", "said"),
    [
        (PROVEN_PROBABILITY - 0.001, 2, "probability of 0.989"),
        (1.0, 1, "fewer than two measurements"),
    ],
)
def test_slowness_that_is_not_proven_drains_nobody(
    probability: float, evidence: int, said: str
) -> None:
    found = verdict(probability=probability, evidence=evidence, n2=Level.SLOW)

    decision = decided(found, Policy(on_straggler=OnStraggler.DRAIN), job_facts())

    (left,) = decision.drains
    assert isinstance(left, LeaveAlone)
    assert said in left.reason
    assert decision.ending.disposition is Disposition.REQUEUE


# --- doubt ---------------------------------------------------------------------------------------


def test_a_person_who_releases_a_held_job_has_answered_for_its_nodes() -> None:
    policy = Policy(on_inconclusive=OnInconclusive.HOLD)

    last = decided(DOUBT, policy, job_facts(held_for=frozenset({"n2"}))).ending
    assert last.disposition is Disposition.PROCEED
    assert "n2 undecided" in last.reason

    again = decided(DOUBT, policy, job_facts(held_for=frozenset({"n3"}))).ending
    assert again.disposition is Disposition.HOLD


def test_a_job_that_can_neither_be_held_nor_run_stops_as_inconclusive() -> None:
    known = job_facts(hold_obstacle="no batch job")

    last = decided(DOUBT, Policy(on_inconclusive=OnInconclusive.HOLD), known).ending

    assert (last.disposition, last.exit_code) == (Disposition.STOP, ExitCode.INCONCLUSIVE)
    assert "no batch job" in last.reason
    assert "--exclude=n2" in last.reason


@pytest.mark.parametrize(
    ("choice", "found", "expected"),
    [
        (OnInconclusive.REQUEUE, DOUBT, Disposition.PROCEED),
        (OnInconclusive.HOLD, DOUBT, Disposition.STOP),
        (OnInconclusive.HOLD, SLOW, Disposition.PROCEED),
        (OnInconclusive.PROCEED, FAULTY, Disposition.STOP),
    ],
)
def test_where_slurm_cannot_be_asked_only_a_faulty_node_or_a_wish_to_hold_ends_a_job(
    choice: OnInconclusive, found: VerdictReached, expected: Disposition
) -> None:
    policy = Policy(on_inconclusive=choice)

    last = decide_unasked(
        found, unwanted(found, policy, batch_node="n1"), policy, "it does not answer"
    )

    assert last.disposition is expected
    assert "it does not answer" in last.reason


# --- a job that was moved often enough -----------------------------------------------------------


def test_a_job_that_cannot_be_held_at_its_limit_stops() -> None:
    known = job_facts(requeues=3, hold_obstacle="it may not be requeued")

    last = decided(FAULTY, Policy(at_requeue_limit=AtRequeueLimit.HOLD), known).ending

    assert last.disposition is Disposition.STOP
    assert "it may not be requeued" in last.reason


def test_a_job_that_may_not_give_nodes_back_leaves_a_faulty_one_by_a_requeue() -> None:
    policy = Policy(nodes_wanted=2, nodes_needed=2, keep_spares=True)
    found = verdict(n2=Level.FAULTY)
    refused = replace(job_facts(), give_back_obstacle="the DB index is being set")
    stuck = replace(refused, hold_obstacle="no --requeue")

    assert decided(found, policy, job_facts()).shrink is not None
    moved = decided(found, policy, refused)
    assert (moved.shrink, moved.ending.disposition) == (None, Disposition.REQUEUE)
    assert moved.ending.nodes == ("n2",)
    stopped = decided(found, policy, stuck).ending
    assert stopped.disposition is Disposition.STOP
    assert "could not give nodes back: the DB index is being set; no --requeue" in stopped.reason
