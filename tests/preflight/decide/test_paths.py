# SPDX-License-Identifier: Apache-2.0
"""A bad path between two nodes: one of them is left where that is possible, and neither accused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_health.preflight.decide.decide import decide
from slurm_health.preflight.decide.paths import ends_to_leave
from slurm_health.preflight.decide.policy import OnStraggler, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from tests.support.situations import job_facts

SPARE = Policy(nodes_wanted=3)  # of the four nodes
WHY = "its tests failed"


def path(*ends: str, level: Level = Level.FAULTY, slowdown: float = 1.0) -> LinkVerdict:
    return LinkVerdict(ends=ends, level=level, slowdown=slowdown, reason=WHY)


def slow(*ends: str, by: float = 3.0) -> LinkVerdict:
    return path(*ends, level=Level.SLOW, slowdown=by)


def verdict_of(*paths: LinkVerdict, **levels: Level) -> VerdictReached:
    """Return what is found of n1 to n4, well but for those named."""
    names = ("n1", "n2", "n3", "n4")
    nodes = [NodeVerdict(node=n, level=levels.get(n, Level.HEALTHY), reason="bad") for n in names]
    return VerdictReached(nodes=nodes, paths=list(paths))


def left(*paths: LinkVerdict, without: Sequence[str] = ()) -> list[str]:
    found = ends_to_leave(verdict_of(*paths), left=without, batch_node="n1", slow=True)
    return [end.node for end in found]


# --- which end ---------------------------------------------------------------------------------


def test_a_node_that_is_slower_goes_first() -> None:
    verdict = verdict_of(path("n2", "n3"))
    slower = [replace_slowdown(node, 1.1 if node.node == "n2" else 1.0) for node in verdict.nodes]
    found = ends_to_leave(
        VerdictReached(nodes=slower, paths=verdict.paths), left=(), batch_node="n1", slow=True
    )
    assert [end.node for end in found] == ["n2"]


def replace_slowdown(node: NodeVerdict, slowdown: float) -> NodeVerdict:
    return NodeVerdict(node=node.node, level=node.level, slowdown=slowdown)


@pytest.mark.parametrize(
    "harmless",
    [
        path("n2", "n3", level=Level.INCONCLUSIVE),  # bad once, and not tried again
        path("leaf1", "leaf2"),
        path("n[1-2]", "n[3-4]"),
        path("leaf1"),
    ],
)
def test_no_node_helps_against_a_path_in_doubt_or_between_switches(harmless: LinkVerdict) -> None:
    assert left(harmless) == []


# --- what is done ------------------------------------------------------------------------------

CUT = verdict_of(path("n2", "n4"))
SLOW = verdict_of(slow("n2", "n4"))


@pytest.mark.parametrize("verdict", [CUT, SLOW], ids=["cut", "slow"])
@pytest.mark.parametrize("policy", [SPARE, Policy(nodes_wanted=4, nodes_needed=3)])
def test_a_job_that_can_do_without_drops_one_end(verdict: VerdictReached, policy: Policy) -> None:
    decision = decide(verdict, policy, job_facts())
    nodes, why = decision.drop
    assert nodes == ("n4",)
    assert f"the path to n2 {'fails' if verdict is CUT else 'is slow'}" in why
    assert decision.outcome.disposition is Disposition.PROCEED
    assert decision.outcome.exit_code is ExitCode.BAD_NODES
    assert decision.drain == ()


def test_a_job_waits_for_others_because_of_a_broken_path_and_not_because_of_a_slow_one() -> None:
    waits = job_facts(free=0)
    stayed = decide(SLOW, Policy(), waits).outcome
    assert stayed.disposition is Disposition.PROCEED
    assert "continuing with n4 anyway: each step may take up to 3.0 times as long" in stayed.reason
    assert decide(CUT, Policy(), waits).outcome.disposition is Disposition.REQUEUE


def test_a_job_that_cannot_leave_runs_and_says_so() -> None:
    outcome = decide(CUT, Policy(), job_facts(requeues=3)).outcome
    assert outcome.disposition is Disposition.PROCEED
    assert "n4: the path to n2 fails, a job on both may hang" in outcome.reason


def test_a_faulty_node_is_left_with_the_end_of_a_path_and_alone_is_drained() -> None:
    found = verdict_of(path("n2", "n4"), n3=Level.FAULTY)
    decision = decide(found, Policy(), job_facts())
    assert set(decision.leave) == {"n3", "n4"}
    assert not decision.may_stay
    assert [drain.node for drain in decision.drain] == ["n3"]


# --- two nodes that cannot exchange data ---------------------------------------------------------


def lone_pair(*, component: str = "network", n1: float = 0.36, n2: float = 0.36) -> VerdictReached:
    """Return what is found of a job's two nodes, with how probably each of them is well."""
    doubt = Level.INCONCLUSIVE
    return VerdictReached(
        nodes=[
            NodeVerdict(
                node=node, level=doubt, probability=well, component=component, reason="no allgather"
            )
            for node, well in (("n1", n1), ("n2", n2))
        ]
    )


@pytest.mark.parametrize("straggler", OnStraggler)
def test_without_another_partner_at_once_the_job_runs_and_says_why_and_what_may_happen(
    straggler: OnStraggler,
) -> None:
    decision = decide(lone_pair(), Policy(on_straggler=straggler), job_facts(needed=2, free=0))

    assert decision.outcome.disposition is Disposition.PROCEED
    assert "none is free" in decision.outcome.reason
    assert "a job on both may hang" in decision.outcome.reason


def test_after_two_partners_without_a_result_it_is_no_longer_taken_for_a_node() -> None:
    outcome = decide(lone_pair(), Policy(), job_facts(needed=2, requeues=2)).outcome

    assert outcome.disposition is Disposition.PROCEED
    assert "the interface or a firewall" in outcome.reason


def test_two_nodes_that_could_not_be_measured_are_not_left_for_that() -> None:
    outcome = decide(lone_pair(component="node"), Policy(), job_facts(needed=2)).outcome

    assert outcome.disposition is Disposition.PROCEED
