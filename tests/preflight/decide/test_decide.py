# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.decide.decide import (
    Decision,
    Drain,
    decide,
    decide_unasked,
    exit_code,
    unwanted,
)
from slurm_health.preflight.decide.facts import JobFacts, requeue_obstacle
from slurm_health.preflight.decide.policy import OnStraggler, OnUnchecked, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, JobOutcome, VerdictReached
from slurm_health.records.verdict import (
    Level,
    LinkVerdict,
    NodeVerdict,
    StorageBlame,
    StorageVerdict,
)
from tests.strategies import verdicts
from tests.support.situations import MANY, job_facts

POLICIES = st.builds(
    Policy,
    max_requeues=st.integers(0, 4),
    on_straggler=st.sampled_from(OnStraggler),
    max_bad_share=st.floats(0.0, 1.0),
    nodes_wanted=st.none() | st.integers(1, 8),
    nodes_needed=st.none() | st.integers(1, 8),
    keep_spares=st.booleans(),
    stops=st.booleans(),
)


@st.composite
def facts_of(draw: st.DrawFn, verdict: VerdictReached) -> JobFacts:
    names = [node.node for node in verdict.nodes]
    return JobFacts(
        job_id=12,
        batch_node=names[0],
        requeues=draw(st.integers(0, 4)),
        no_requeue=draw(st.sampled_from(["", "it is not a batch job"])),
        named=frozenset(draw(st.sets(st.sampled_from(names)))),
        candidates=draw(st.none() | st.frozensets(st.sampled_from([*names, "x1", "x2", "x3"]))),
        needed=draw(st.integers(0, 8)),
        free=draw(st.none() | st.integers(0, 4)),
        may_drain=draw(st.booleans()),
        cannot_drop=draw(st.sampled_from(["", "it is not a batch job"])),
    )


def verdict_of(**levels: Level) -> VerdictReached:
    return VerdictReached(
        nodes=[
            NodeVerdict(node=node, level=level, component="network", reason="no allgather")
            for node, level in levels.items()
        ]
    )


def names_at(verdict: VerdictReached, level: Level) -> set[str]:
    return {node.node for node in verdict.nodes if node.level is level}


ONE_FAULTY = verdict_of(n1=Level.HEALTHY, n2=Level.FAULTY, n3=Level.HEALTHY)


@given(st.data())
def test_what_is_decided_never_breaks_a_promise(data: st.DataObject) -> None:
    verdict = data.draw(verdicts())
    policy = data.draw(POLICIES)
    known = data.draw(facts_of(verdict))

    decision = decide(verdict, policy, known)

    faulty, healthy = (names_at(verdict, level) for level in (Level.FAULTY, Level.HEALTHY))
    avoid = unwanted(verdict, policy, batch_node=known.batch_node)
    drained = [drain.node for drain in decision.drain]
    assert len(drained) == len(set(drained))
    assert set(drained) <= faulty
    assert not drained or known.may_drain
    assert len(drained) <= max(1, int(policy.max_bad_share * len(verdict.nodes)))
    outcome, (drop, why) = decision.outcome, decision.drop
    assert outcome.reason
    assert bool(drop) <= bool(why)
    if drop or outcome.spares:
        parts = [*outcome.nodes, *drop, *outcome.spares]
        assert sorted(parts) == sorted(node.node for node in verdict.nodes)
        assert not drop or not known.cannot_drop
        assert policy.keep_spares or not outcome.spares
        assert set(outcome.spares) <= healthy
        assert known.batch_node in outcome.nodes
        assert not faulty & set(outcome.nodes)
        assert outcome.disposition is Disposition.PROCEED
    match outcome.disposition:
        case Disposition.REQUEUE:
            assert decision.leave
            assert faulty <= set(decision.leave) <= {node.node for node in avoid}
            assert decision.may_stay is not bool(faulty)
            assert known.requeues < policy.max_requeues
            assert not requeue_obstacle(known, decision.leave)
            slow = {node.node for node in avoid if node.level is Level.SLOW}  # or their paths
            if slow & set(decision.leave):
                keep = len(verdict.nodes) - len(decision.leave)
                assert (known.free or 0) >= known.needed - keep
            return
        case Disposition.PROCEED:
            assert not faulty or drop or outcome.spares or not policy.stops
        case Disposition.STOP:
            assert faulty
            assert policy.stops
    assert outcome.exit_code is exit_code(verdict)


@given(st.data())
def test_slow_nodes_alone_never_put_a_job_where_it_waits(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1))
    levels = st.sampled_from([Level.HEALTHY, Level.SLOW])
    verdict = verdict_of(**{name: data.draw(levels) for name in names})
    known = replace(data.draw(facts_of(verdict)), free=0, needed=len(names))

    outcome = decide(verdict, data.draw(POLICIES), known).outcome

    assert outcome.disposition is Disposition.PROCEED


def test_a_faulty_node_is_drained_and_then_the_job_requeued_without_it() -> None:
    assert decide(ONE_FAULTY, Policy(), job_facts()) == Decision(
        drain=(Drain(node="n2", component="network", reason="network: no allgather"),),
        outcome=JobOutcome(
            disposition=Disposition.REQUEUE,
            exit_code=ExitCode.BAD_NODES,
            reason="n2: no allgather",
        ),
        leave=("n2",),
    )


def test_too_many_bad_nodes_at_once_are_not_drained() -> None:
    verdict = verdict_of(n1=Level.FAULTY, n2=Level.FAULTY, n3=Level.FAULTY, n4=Level.HEALTHY)

    decision = decide(verdict, Policy(max_bad_share=0.5), job_facts())

    assert decision.drain == ()
    assert decision.left_alone == (
        ("n1", "n2", "n3"),
        "3 of 4 nodes bad at once: probably a fabric or software problem",
    )


# --- slow nodes ----------------------------------------------------------------------------------

SLOW = verdict_of(n1=Level.HEALTHY, n2=Level.SLOW, n3=Level.HEALTHY, n4=Level.HEALTHY)


@pytest.mark.parametrize(
    ("choice", "policy", "free", "expected"),
    [
        (OnStraggler.EXCLUDE, Policy(nodes_wanted=3, nodes_needed=3), 0, "proceed without n2"),
        (OnStraggler.EXCLUDE, Policy(nodes_wanted=4, nodes_needed=3), 0, "proceed without n2"),
        (OnStraggler.EXCLUDE, Policy(), MANY, "requeue without n2"),
        (OnStraggler.EXCLUDE, Policy(), 0, "proceed"),
        (OnStraggler.REPORT, Policy(nodes_wanted=3, nodes_needed=3), MANY, "proceed without n2"),
        (OnStraggler.REPORT, Policy(nodes_wanted=4, nodes_needed=3), MANY, "proceed"),
        (OnStraggler.REPORT, Policy(), MANY, "proceed"),
    ],
)
def test_a_slow_node_causes_what_the_table_of_the_documentation_says(
    choice: OnStraggler, policy: Policy, free: int, expected: str
) -> None:
    """The table is in docs/howto/what-happens-to-my-job.md."""
    decision = decide(SLOW, replace(policy, on_straggler=choice), job_facts(free=free))

    left = ",".join([*decision.leave, *decision.drop[0]])
    shown = f"{decision.outcome.disposition}{f' without {left}' if left else ''}"
    assert (shown, decision.drain) == (expected, ())


def test_a_job_of_a_user_who_asked_for_no_check_runs_on_the_bad_node_that_it_names() -> None:
    known = job_facts(named=frozenset({"n2"}))

    outcome = decide(ONE_FAULTY, Policy(stops=False), known).outcome

    assert outcome.disposition is Disposition.PROCEED
    assert "it asks for n2 by name (--nodelist); starting anyway" in outcome.reason


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (job_facts(free=0), "it would have to wait for 1 other node: none is free"),
        (job_facts(free=1, needed=5), "it would have to wait for 2 other nodes: only 1 free"),
        (job_facts(free=None), "Slurm was not asked for other nodes"),
        (job_facts(unusable={"n3": "draining"}), "to wait for nodes: n3 is draining"),
        (job_facts(requeues=3), "the limit is 3"),
        (job_facts(no_requeue="it is not a batch job"), "it is not a batch job"),
        (job_facts(named=frozenset({"n2"})), "by name (--nodelist)"),
        (job_facts(candidates=frozenset({"n1", "n2", "n3"}), needed=3), "has 2 nodes without n2"),
    ],
)
def test_a_job_that_cannot_leave_a_slow_node_at_once_runs_on_it_and_says_what_that_costs(
    known: JobFacts, why: str
) -> None:
    healthy = [NodeVerdict(node=node, level=Level.HEALTHY) for node in ("n1", "n3", "n4")]
    slow = NodeVerdict(
        node="n2",
        level=Level.SLOW,
        slowdown=2.14,
        component="network",
        reason="allgather slow with n1 (12 ms, healthy pairs 5.6 ms)",
    )

    outcome = decide(VerdictReached(nodes=[*healthy, slow]), Policy(), known).outcome

    assert outcome.disposition is Disposition.PROCEED
    assert outcome.reason.startswith("n2: allgather slow with n1 (12 ms, healthy pairs 5.6 ms); ")
    assert why in outcome.reason
    assert outcome.reason.endswith(
        "continuing with n2 anyway: each step may take up to 2.1 times as long (network)"
    )


# --- what ends a job -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "needed", "said"),
    [
        (frozenset({"n1", "n2", "n3"}), 3, "--exclude=n2, on 2 nodes at most (--nodes=2)"),
        (frozenset({"n1", "n2", "n3", "n4"}), 3, "--exclude=n2"),  # n1, n3 and n4 are enough
        (None, 3, "--exclude=n2"),  # it is unknown which nodes there are
    ],
)
def test_a_job_that_stops_is_told_to_ask_for_no_more_nodes_than_there_are(
    candidates: frozenset[str] | None, needed: int, said: str
) -> None:
    known = job_facts(candidates=candidates, needed=needed, requeues=3)

    outcome = decide(ONE_FAULTY, Policy(), known).outcome

    assert outcome.disposition is Disposition.STOP
    assert outcome.reason.endswith(f"submit the job again with {said}")


def test_a_job_that_asks_for_its_bad_node_by_name_is_told_to_ask_for_it_no_more() -> None:
    known = job_facts(named=frozenset({"n1", "n2"}))

    outcome = decide(ONE_FAULTY, Policy(), known).outcome

    assert outcome.disposition is Disposition.STOP
    assert outcome.reason.endswith("submit the job again without n2 in --nodelist")


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (Level.FAULTY, Disposition.STOP),
        (Level.SLOW, Disposition.PROCEED),
    ],
)
def test_if_slurm_cannot_be_asked_only_a_faulty_node_ends_a_job(
    level: Level, expected: Disposition
) -> None:
    verdict = verdict_of(n1=Level.HEALTHY, n2=level)
    avoid = unwanted(verdict, Policy(), batch_node="n1")

    outcome = decide_unasked(verdict, avoid, "it does not answer")

    assert outcome.disposition is expected
    assert "it does not answer" in outcome.reason


# --- fewer nodes ---------------------------------------------------------------------------------


def test_a_job_that_may_not_give_nodes_back_leaves_a_faulty_one_by_a_requeue() -> None:
    policy = Policy(nodes_wanted=2, nodes_needed=2, keep_spares=True)
    refused = replace(job_facts(), cannot_drop="the DB index is being set")
    stuck = replace(refused, no_requeue="no --requeue")

    assert decide(ONE_FAULTY, policy, job_facts()).drop[0] == ("n2",)
    moved = decide(ONE_FAULTY, policy, refused)
    assert (moved.drop[0], moved.leave) == ((), ("n2",))
    stopped = decide(ONE_FAULTY, policy, stuck).outcome
    assert stopped.disposition is Disposition.STOP
    assert "could not give nodes back: the DB index is being set; no --requeue" in stopped.reason


@pytest.mark.parametrize("where", ["paths", "leaves"])
def test_a_bad_link_is_a_finding_although_every_node_is_well(where: str) -> None:
    link = [LinkVerdict(ends=("n1", "n2"), level=Level.SLOW, slowdown=1.82)]
    verdict = VerdictReached(
        nodes=[NodeVerdict(node="n1", level=Level.HEALTHY)],
        paths=link if where == "paths" else [],
        leaves=link if where == "leaves" else [],
    )

    assert exit_code(verdict) is ExitCode.BAD_NODES
    outcome = decide(verdict, Policy(), job_facts()).outcome
    assert outcome.disposition is Disposition.PROCEED
    assert outcome.reason == (
        "the connection n1-n2 is bad, no node is to blame: each step may take up to 1.82 times as"
        " long (network)"
    )


@pytest.mark.parametrize(
    ("blame", "choice", "disposition", "code"),
    [
        ("server", OnUnchecked.PROCEED, Disposition.PROCEED, ExitCode.INCONCLUSIVE),
        ("server", OnUnchecked.STOP, Disposition.STOP, ExitCode.UNAVAILABLE),
        ("user", OnUnchecked.STOP, Disposition.PROCEED, ExitCode.INCONCLUSIVE),
        ("undecided", OnUnchecked.STOP, Disposition.PROCEED, ExitCode.INCONCLUSIVE),
    ],
)
def test_storage_that_no_node_is_to_blame_for_stops_a_job_only_if_its_user_wants_that(
    blame: str, choice: OnUnchecked, disposition: Disposition, code: ExitCode
) -> None:
    hung = StorageVerdict(
        path="/ckpt", blame=StorageBlame(blame), level=Level.FAULTY, reason="/ckpt hangs"
    )
    well = verdict_of(n1=Level.HEALTHY, n2=Level.HEALTHY)
    verdict = VerdictReached(nodes=well.nodes, storage=[hung])
    decision = decide(verdict, Policy(on_unchecked=choice), JobFacts(job_id=1, batch_node="n1"))
    assert (decision.outcome.disposition, decision.outcome.exit_code) == (disposition, code)
    assert "all healthy; /ckpt hangs" in decision.outcome.reason
    assert (decision.drain, decision.drop, decision.leave) == ((), ((), ""), ())
