# SPDX-License-Identifier: Apache-2.0
"""A job that a person has released after it was held for faulty nodes."""

from __future__ import annotations

from slurm_health.preflight.decide.policy import AtRequeueLimit, OnInconclusive, Policy
from slurm_health.records.records import Disposition
from slurm_health.records.verdict import Level
from tests.preflight.decide.test_decide_options import FAULTY, kinds, verdict
from tests.support.situations import decided, job_facts


def test_a_person_who_releases_a_job_held_at_its_limit_has_it_run() -> None:
    policy = Policy(at_requeue_limit=AtRequeueLimit.HOLD)
    released = job_facts(requeues=3, held_for=frozenset({"n2"}))

    decision = decided(FAULTY, policy, released)
    other = decided(verdict(n2=Level.FAULTY, n3=Level.FAULTY), policy, released).ending

    assert kinds(decision) == "Drain proceed"
    assert "it was held for n2, and a person released it" in decision.ending.reason
    assert (other.disposition, other.nodes) == (Disposition.HOLD, ("n2", "n3"))


def test_a_job_held_at_its_limit_is_held_for_its_undecided_nodes_at_once() -> None:
    policy = Policy(
        at_requeue_limit=AtRequeueLimit.HOLD, on_inconclusive=OnInconclusive.HOLD, max_requeues=0
    )
    found = verdict(n2=Level.FAULTY, n3=Level.INCONCLUSIVE)

    def told(*held_for: str) -> tuple[str, tuple[str, ...]]:
        known = job_facts(held_for=frozenset(held_for), may_drain=False)
        ending = decided(found, policy, known).ending
        return ending.disposition, ending.nodes

    assert told() == ("hold", ("n2", "n3"))
    assert told("n2") == ("hold", ("n3",))
    assert told("n2", "n3") == ("proceed", ())
