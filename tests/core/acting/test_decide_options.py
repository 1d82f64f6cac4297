# SPDX-License-Identifier: Apache-2.0
"""What the user chose for slow nodes, for doubt, and for a job that was moved often enough."""

from __future__ import annotations

import pytest

from slurm_health.core.acting.decide import Decision, JobFacts, decide_unasked, unwanted
from slurm_health.core.acting.drains import PROVEN_PROBABILITY, Drain, LeaveAlone
from slurm_health.core.acting.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.core.records import Disposition, VerdictReached
from slurm_health.core.verdict import Level, NodeVerdict
from slurm_health.errors import ExitCode
from tests.support.situations import decided, job_facts

NODES = ("n1", "n2", "n3", "n4")


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


@pytest.mark.parametrize(
    ("choice", "wanted", "needed", "expected"),
    [
        (OnStraggler.EXCLUDE, None, None, "requeue"),
        (OnStraggler.EXCLUDE, 3, None, "Shrink proceed"),
        (OnStraggler.EXCLUDE, 4, 3, "Shrink proceed"),
        (OnStraggler.REQUEUE, None, None, "requeue"),
        (OnStraggler.REQUEUE, 3, None, "Shrink proceed"),
        (OnStraggler.REQUEUE, 4, 3, "requeue"),
        (OnStraggler.REPORT, 4, 3, "proceed"),
        (OnStraggler.DRAIN, None, None, "Drain requeue"),
        (OnStraggler.DRAIN, 4, 3, "Drain Shrink proceed"),
    ],
)
def test_a_slow_node_causes_what_the_user_chose(
    choice: OnStraggler, wanted: int | None, needed: int | None, expected: str
) -> None:
    policy = Policy(on_straggler=choice, nodes_wanted=wanted, nodes_needed=needed)

    assert kinds(decided(SLOW, policy, job_facts())) == expected


@pytest.mark.parametrize(
    "known", [job_facts(requeues=3), job_facts(requeue_obstacle="it is not a batch job")]
)
def test_a_job_that_cannot_be_requeued_keeps_its_size_no_longer(known: JobFacts) -> None:
    policy = Policy(on_straggler=OnStraggler.REQUEUE, nodes_wanted=4, nodes_needed=3)

    assert kinds(decided(SLOW, policy, known)) == "Shrink proceed"


def test_a_faulty_node_makes_a_job_smaller_that_would_leave_a_slow_one() -> None:
    policy = Policy(on_straggler=OnStraggler.REQUEUE, nodes_wanted=4, nodes_needed=3)

    assert kinds(decided(verdict(n2=Level.FAULTY), policy, job_facts())) == "Drain Shrink proceed"


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


def test_slow_nodes_count_towards_the_share_beyond_which_nobody_is_drained() -> None:
    found = verdict(n2=Level.SLOW, n3=Level.SLOW, n4=Level.FAULTY)

    (left,) = decided(found, Policy(on_straggler=OnStraggler.DRAIN), job_facts()).drains

    assert isinstance(left, LeaveAlone)
    assert set(left.nodes) == {"n2", "n3", "n4"}


# --- doubt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "wanted", "expected"),
    [
        (OnInconclusive.PROCEED, None, "proceed"),
        (OnInconclusive.HOLD, None, "hold"),
        (OnInconclusive.HOLD, 3, "Shrink proceed"),
        (OnInconclusive.REQUEUE, None, "requeue"),
        (OnInconclusive.REQUEUE, 3, "Shrink proceed"),
    ],
)
def test_an_undecided_node_causes_what_the_user_chose_and_is_never_drained(
    choice: OnInconclusive, wanted: int | None, expected: str
) -> None:
    policy = Policy(on_inconclusive=choice, nodes_wanted=wanted)

    assert kinds(decided(DOUBT, policy, job_facts())) == expected


def test_a_bad_node_is_left_at_once_although_another_one_is_in_doubt() -> None:
    found = verdict(n2=Level.INCONCLUSIVE, n3=Level.FAULTY)

    for choice, without in ((OnInconclusive.HOLD, ("n3",)), (OnInconclusive.REQUEUE, NODES[1:3])):
        last = decided(found, Policy(on_inconclusive=choice), job_facts()).ending
        assert last.disposition is Disposition.REQUEUE
        assert last.nodes == without


def test_a_person_who_releases_a_held_job_has_answered_for_its_nodes() -> None:
    policy = Policy(on_inconclusive=OnInconclusive.HOLD)

    last = decided(DOUBT, policy, job_facts(held_for=frozenset({"n2"}))).ending
    assert last.disposition is Disposition.PROCEED
    assert "n2 undecided" in last.reason

    again = decided(DOUBT, policy, job_facts(held_for=frozenset({"n3"}))).ending
    assert again.disposition is Disposition.HOLD


def test_a_job_that_can_neither_be_held_nor_run_stops_as_inconclusive() -> None:
    known = job_facts(requeue_obstacle="no batch job", hold_obstacle="no batch job")

    last = decided(DOUBT, Policy(on_inconclusive=OnInconclusive.HOLD), known).ending

    assert (last.disposition, last.exit_code) == (Disposition.STOP, ExitCode.INCONCLUSIVE)
    assert "no batch job" in last.reason
    assert "--exclude=n2" in last.reason


@pytest.mark.parametrize(
    "known", [job_facts(requeues=3), job_facts(requeue_obstacle="it asks for n2 itself")]
)
def test_doubt_does_not_end_a_job_that_would_rather_be_elsewhere(known: JobFacts) -> None:
    last = decided(DOUBT, Policy(on_inconclusive=OnInconclusive.REQUEUE), known).ending

    assert (last.disposition, last.exit_code) == (Disposition.PROCEED, ExitCode.INCONCLUSIVE)
    assert "continuing with n2 anyway" in last.reason


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

    last = decide_unasked(found, unwanted(found, policy), policy, "it does not answer")

    assert last.disposition is expected
    assert "it does not answer" in last.reason


# --- a job that was moved often enough -----------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (AtRequeueLimit.STOP, Disposition.STOP),
        (AtRequeueLimit.START, Disposition.PROCEED),
        (AtRequeueLimit.HOLD, Disposition.HOLD),
    ],
)
def test_a_job_at_its_limit_does_what_the_user_chose(
    choice: AtRequeueLimit, expected: Disposition
) -> None:
    policy = Policy(at_requeue_limit=choice)
    decision = decided(verdict(n2=Level.FAULTY), policy, job_facts(requeues=3))

    assert [type(each) for each in decision.drains] == [Drain]
    last = decision.ending
    assert last.disposition is expected
    assert "(--max-requeues)" in last.reason
    assert last.exit_code is ExitCode.BAD_NODES


def test_a_job_that_cannot_be_held_at_its_limit_stops() -> None:
    known = job_facts(requeues=3, hold_obstacle="it may not be requeued")

    last = decided(FAULTY, Policy(at_requeue_limit=AtRequeueLimit.HOLD), known).ending

    assert last.disposition is Disposition.STOP
    assert "it may not be requeued" in last.reason
