# SPDX-License-Identifier: Apache-2.0
"""A bad path between two nodes: one of them is left where that is possible, and neither accused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurm_health.preflight.decide.paths import ends_to_leave
from slurm_health.preflight.decide.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from tests.support.situations import asked_about, decided, job_facts

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


def test_the_batch_node_stays_even_where_most_bad_paths_meet() -> None:
    assert left(path("n1", "n2"), path("n1", "n3"), path("n1", "n4")) == ["n2", "n3", "n4"]


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
    decision = decided(verdict, policy, job_facts())
    assert decision.shrink is not None
    assert decision.shrink.drop == ("n4",)
    assert f"the path to n2 {'fails' if verdict is CUT else 'is slow'}" in decision.shrink.reason
    assert decision.ending.disposition is Disposition.PROCEED
    assert decision.ending.exit_code is ExitCode.BAD_NODES
    assert decision.ending.may_stay
    assert decision.drains == ()


def test_for_a_slow_path_nobody_waits_and_for_one_that_fails_everybody_does() -> None:
    waits = job_facts(wait="it would have to wait for 1 other node")
    stayed = decided(SLOW, Policy(), waits).ending
    assert stayed.disposition is Disposition.PROCEED
    assert "continuing with n4 anyway: each step may take up to 3.0 times as long" in stayed.reason
    assert decided(CUT, Policy(), waits).ending.disposition is Disposition.REQUEUE
    asked = [asked_about(each, Policy(), waits) for each in (SLOW, CUT)]
    assert asked[1] is None
    assert asked[0] is not None
    assert (asked[0].leave, asked[0].keep, asked[0].more) == (("n4",), ("n1", "n2", "n3"), 1)


def test_a_slow_path_drains_nobody_although_slow_nodes_are_to_be_drained() -> None:
    assert decided(SLOW, Policy(on_straggler=OnStraggler.DRAIN), job_facts()).drains == ()


@pytest.mark.parametrize("doubt", OnInconclusive)
@pytest.mark.parametrize("policy", [Policy(), Policy(at_requeue_limit=AtRequeueLimit.START)])
def test_a_job_that_cannot_leave_runs_and_says_so(policy: Policy, doubt: OnInconclusive) -> None:
    spent = job_facts(requeues=policy.max_requeues)
    ending = decided(CUT, replace(policy, on_inconclusive=doubt), spent).ending
    assert ending.disposition is Disposition.PROCEED
    assert "n4: the path to n2 fails, a job on both may hang" in ending.reason


def test_a_faulty_node_is_left_with_the_end_of_a_path_and_alone_is_drained() -> None:
    found = verdict_of(path("n2", "n4"), n3=Level.FAULTY)
    decision = decided(found, Policy(), job_facts())
    assert set(decision.ending.nodes) == {"n3", "n4"}
    assert not decision.ending.may_stay
    assert [getattr(drain, "node", "") for drain in decision.drains] == ["n3"]


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
    policy = Policy(on_straggler=straggler)
    decision = decided(lone_pair(), policy, job_facts(wait="no other node is free"))

    assert decision.ending.disposition is Disposition.PROCEED
    assert "no other node is free" in decision.ending.reason
    assert "a job on both may hang" in decision.ending.reason


def test_after_two_partners_in_vain_it_is_no_longer_taken_for_a_node() -> None:
    facts = job_facts(requeues=2)
    decision = decided(lone_pair(), Policy(), facts)

    assert decision.ending.disposition is Disposition.PROCEED
    assert "the interface or a firewall" in decision.ending.reason
    assert asked_about(lone_pair(), Policy(), facts) is None


def test_two_nodes_that_could_not_be_measured_are_not_left_for_that() -> None:
    decision = decided(lone_pair(component="node"), Policy(), job_facts())

    assert decision.ending.disposition is Disposition.PROCEED
