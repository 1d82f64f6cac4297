# SPDX-License-Identifier: Apache-2.0
"""What the user chose for slow nodes, for doubt, and for a job that was moved often enough."""

from __future__ import annotations

import pytest

from slurm_health.core.acting.decide import (
    Action,
    AtRequeueLimit,
    Disposition,
    Finish,
    Hold,
    OnInconclusive,
    OnStraggler,
    Policy,
    RequeueElsewhere,
    Situation,
    decide,
    decide_unasked,
)
from slurm_health.core.acting.drains import PROVEN_PROBABILITY, Drain, LeaveAlone
from slurm_health.core.records import VerdictReached
from slurm_health.core.verdict import Level, NodeVerdict
from slurm_health.errors import ExitCode
from tests.support.situations import situation

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


def kinds(actions: tuple[Action, ...]) -> str:
    return " ".join(type(action).__name__ for action in actions)


SLOW = verdict(n2=Level.SLOW)
DOUBT = verdict(n2=Level.INCONCLUSIVE)


# --- slow nodes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "wanted", "needed", "expected"),
    [
        (OnStraggler.EXCLUDE, None, None, "RequeueElsewhere"),
        (OnStraggler.EXCLUDE, 3, None, "Shrink Finish"),
        (OnStraggler.EXCLUDE, 4, 3, "Shrink Finish"),
        (OnStraggler.REQUEUE, None, None, "RequeueElsewhere"),
        (OnStraggler.REQUEUE, 3, None, "Shrink Finish"),
        (OnStraggler.REQUEUE, 4, 3, "RequeueElsewhere"),
        (OnStraggler.REPORT, 4, 3, "Finish"),
        (OnStraggler.DRAIN, None, None, "Drain RequeueElsewhere"),
        (OnStraggler.DRAIN, 4, 3, "Drain Shrink Finish"),
    ],
)
def test_a_slow_node_causes_what_the_user_chose(
    choice: OnStraggler, wanted: int | None, needed: int | None, expected: str
) -> None:
    policy = Policy(on_straggler=choice, nodes_wanted=wanted, nodes_needed=needed)

    assert kinds(decide(SLOW, policy, situation())) == expected


@pytest.mark.parametrize(
    "known", [situation(requeues=3), situation(requeue_obstacle="it is not a batch job")]
)
def test_a_job_that_cannot_be_requeued_keeps_its_size_no_longer(known: Situation) -> None:
    policy = Policy(on_straggler=OnStraggler.REQUEUE, nodes_wanted=4, nodes_needed=3)

    assert kinds(decide(SLOW, policy, known)) == "Shrink Finish"


@pytest.mark.parametrize("needed", [None, 3])
def test_a_job_that_moves_says_with_how_few_nodes_it_makes_do(needed: int | None) -> None:
    policy = Policy(on_straggler=OnStraggler.REQUEUE, nodes_wanted=4, nodes_needed=needed)

    (move,) = decide(SLOW, policy, situation())

    assert isinstance(move, RequeueElsewhere)
    assert move.least == needed


def test_a_faulty_node_makes_a_job_smaller_that_would_leave_a_slow_one() -> None:
    policy = Policy(on_straggler=OnStraggler.REQUEUE, nodes_wanted=4, nodes_needed=3)

    assert kinds(decide(verdict(n2=Level.FAULTY), policy, situation())) == "Drain Shrink Finish"


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

    left, last = decide(found, Policy(on_straggler=OnStraggler.DRAIN), situation())

    assert isinstance(left, LeaveAlone)
    assert said in left.reason
    assert isinstance(last, RequeueElsewhere)


def test_slow_nodes_count_towards_the_share_beyond_which_nobody_is_drained() -> None:
    found = verdict(n2=Level.SLOW, n3=Level.SLOW, n4=Level.FAULTY)

    left, _ = decide(found, Policy(on_straggler=OnStraggler.DRAIN), situation())

    assert isinstance(left, LeaveAlone)
    assert set(left.nodes) == {"n2", "n3", "n4"}


# --- doubt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "wanted", "expected"),
    [
        (OnInconclusive.PROCEED, None, "Finish"),
        (OnInconclusive.HOLD, None, "Hold"),
        (OnInconclusive.HOLD, 3, "Shrink Finish"),
        (OnInconclusive.REQUEUE, None, "RequeueElsewhere"),
        (OnInconclusive.REQUEUE, 3, "Shrink Finish"),
    ],
)
def test_an_undecided_node_causes_what_the_user_chose_and_is_never_drained(
    choice: OnInconclusive, wanted: int | None, expected: str
) -> None:
    policy = Policy(on_inconclusive=choice, nodes_wanted=wanted)

    assert kinds(decide(DOUBT, policy, situation())) == expected


def test_a_bad_node_is_left_at_once_although_another_one_is_in_doubt() -> None:
    found = verdict(n2=Level.INCONCLUSIVE, n3=Level.FAULTY)

    for choice, without in ((OnInconclusive.HOLD, ("n3",)), (OnInconclusive.REQUEUE, NODES[1:3])):
        last = decide(found, Policy(on_inconclusive=choice), situation())[-1]
        assert isinstance(last, RequeueElsewhere)
        assert last.exclude == without


def test_a_person_who_releases_a_held_job_has_answered_for_its_nodes() -> None:
    policy = Policy(on_inconclusive=OnInconclusive.HOLD)

    (last,) = decide(DOUBT, policy, situation(held_for=frozenset({"n2"})))
    assert isinstance(last, Finish)
    assert "n2 undecided" in last.reason

    (again,) = decide(DOUBT, policy, situation(held_for=frozenset({"n3"})))
    assert isinstance(again, Hold)


def test_a_job_that_can_neither_be_held_nor_run_stops_as_inconclusive() -> None:
    known = situation(requeue_obstacle="no batch job", hold_obstacle="no batch job")

    (last,) = decide(DOUBT, Policy(on_inconclusive=OnInconclusive.HOLD), known)

    assert isinstance(last, Finish)
    assert (last.disposition, last.exit_code) == (Disposition.STOP, ExitCode.INCONCLUSIVE)
    assert "no batch job" in last.reason
    assert "--exclude=n2" in last.reason


@pytest.mark.parametrize(
    "known", [situation(requeues=3), situation(requeue_obstacle="it asks for n2 itself")]
)
def test_doubt_does_not_end_a_job_that_would_rather_be_elsewhere(known: Situation) -> None:
    (last,) = decide(DOUBT, Policy(on_inconclusive=OnInconclusive.REQUEUE), known)

    assert isinstance(last, Finish)
    assert (last.disposition, last.exit_code) == (Disposition.PROCEED, ExitCode.INCONCLUSIVE)
    assert "going on with n2 all the same" in last.reason


@pytest.mark.parametrize(
    ("choice", "found", "expected"),
    [
        (OnInconclusive.REQUEUE, DOUBT, Disposition.PROCEED),
        (OnInconclusive.HOLD, DOUBT, Disposition.STOP),
        (OnInconclusive.PROCEED, SLOW, Disposition.STOP),
    ],
)
def test_where_slurm_cannot_be_asked_doubt_alone_does_not_end_a_job(
    choice: OnInconclusive, found: VerdictReached, expected: Disposition
) -> None:
    last = decide_unasked(found, Policy(on_inconclusive=choice), "it does not answer")

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
    drain, last = decide(verdict(n2=Level.FAULTY), policy, situation(requeues=3))

    assert isinstance(drain, Drain)
    found = Disposition.HOLD if isinstance(last, Hold) else getattr(last, "disposition", None)
    assert found is expected
    assert isinstance(last, Finish | Hold)
    assert "(--max-requeues)" in last.reason
    assert last.exit_code is ExitCode.BAD_NODES


def test_a_job_that_cannot_be_held_at_its_limit_stops() -> None:
    known = situation(requeues=3, hold_obstacle="it may not be requeued")

    *_, last = decide(SLOW, Policy(at_requeue_limit=AtRequeueLimit.HOLD), known)

    assert isinstance(last, Finish)
    assert last.disposition is Disposition.STOP
    assert "it may not be requeued" in last.reason
