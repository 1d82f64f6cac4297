# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.decide.decide import exit_code, unwanted
from slurm_health.preflight.decide.decision import Decision, Drain, Ending, LeaveAlone
from slurm_health.preflight.decide.facts import JobFacts, requeue_obstacle
from slurm_health.preflight.decide.policy import AtRequeueLimit, OnInconclusive, OnStraggler, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from tests.strategies import verdicts
from tests.support.situations import asked_about, decided, job_facts

POLICIES = st.builds(
    Policy,
    max_requeues=st.integers(0, 4),
    on_straggler=st.sampled_from(OnStraggler),
    on_inconclusive=st.sampled_from(OnInconclusive),
    at_requeue_limit=st.sampled_from(AtRequeueLimit),
    max_bad_share=st.floats(0.0, 1.0),
    nodes_wanted=st.none() | st.integers(1, 8),
    nodes_needed=st.none() | st.integers(1, 8),
    keep_spares=st.booleans(),
)


@st.composite
def facts_of(draw: st.DrawFn, verdict: VerdictReached) -> JobFacts:
    names = [node.node for node in verdict.nodes]
    return JobFacts(
        job_id=12,
        batch_node=names[0],
        requeues=draw(st.integers(0, 4)),
        hold_obstacle=draw(st.sampled_from(["", "it is not a batch job"])),
        named=frozenset(draw(st.sets(st.sampled_from(names)))),
        candidates=draw(st.none() | st.frozensets(st.sampled_from([*names, "x1", "x2", "x3"]))),
        asked=draw(st.integers(0, 8)),
        wait=draw(st.sampled_from(["", "it would have to wait for 1 other node"])),
        held_for=frozenset(draw(st.sets(st.sampled_from(names)))),
        may_drain=draw(st.booleans()),
        give_back_obstacle=draw(st.sampled_from(["", "it is not a batch job"])),
    )


def verdict_of(**levels: Level) -> VerdictReached:
    return VerdictReached(
        nodes=[
            NodeVerdict(node=node, level=level, component="network", reason="no allgather")
            for node, level in levels.items()
        ]
    )


def verdict_nodes(verdict: VerdictReached, level: Level) -> list[str]:
    return [node.node for node in verdict.nodes if node.level is level]


ONE_FAULTY = verdict_of(n1=Level.HEALTHY, n2=Level.FAULTY, n3=Level.HEALTHY)


@given(st.data())
def test_what_is_decided_never_breaks_a_promise(data: st.DataObject) -> None:
    verdict = data.draw(verdicts())
    policy = data.draw(POLICIES)
    known = data.draw(facts_of(verdict))

    decision = decided(verdict, policy, known)

    at = {level: set(verdict_nodes(verdict, level)) for level in Level}
    unfit = unwanted(verdict, policy, batch_node=known.batch_node)
    avoided = {node.node for node in unfit}
    drains = [each for each in decision.drains if isinstance(each, Drain)]
    drained = [each.node for each in drains]
    may_go = at[Level.FAULTY] | (
        at[Level.SLOW] if policy.on_straggler is OnStraggler.DRAIN else set()
    )
    assert len(drained) == len(set(drained))
    assert set(drained) <= may_go
    assert not drained or known.may_drain
    assert len(drained) <= max(1, int(policy.max_bad_share * len(verdict.nodes)))
    ending, shrink = decision.ending, decision.shrink
    starts_anyway = known.held_for >= at[Level.FAULTY] or (
        policy.at_requeue_limit is AtRequeueLimit.START and known.requeues >= policy.max_requeues
    )
    assert ending.reason
    if shrink is not None:
        parts = [*shrink.keep, *shrink.drop, *shrink.spares]
        assert sorted(parts) == sorted(node.node for node in verdict.nodes)
        assert shrink.drop or shrink.spares
        assert not shrink.drop or not known.give_back_obstacle
        assert policy.keep_spares or not shrink.spares
        assert set(shrink.spares) <= at[Level.HEALTHY]
        assert known.batch_node in shrink.keep
        assert not at[Level.FAULTY] & set(shrink.keep) or starts_anyway
        assert shrink.reason
        assert ending.disposition is Disposition.PROCEED
    match ending.disposition:
        case Disposition.REQUEUE:
            assert at[Level.FAULTY] <= set(ending.nodes) <= avoided
            assert ending.nodes
            released = known.held_for.issuperset(ending.nodes)
            assert ending.may_stay is (released or not at[Level.FAULTY])
            assert known.requeues < policy.max_requeues
            assert not requeue_obstacle(known, ending.nodes)
            waits = policy.on_straggler in {OnStraggler.REQUEUE, OnStraggler.DRAIN}
            slow = {node.node for node in unfit if node.level is Level.SLOW}  # or their paths
            assert waits or not known.wait or not slow & set(ending.nodes)
            return
        case Disposition.HOLD:
            assert ending.nodes
            assert not set(ending.nodes) <= known.held_for
            assert not known.hold_obstacle
            assert OnInconclusive.HOLD in {policy.on_inconclusive} or (
                policy.at_requeue_limit is AtRequeueLimit.HOLD
                and known.requeues >= policy.max_requeues
            )
        case Disposition.PROCEED:
            if at[Level.FAULTY] and shrink is None:
                assert starts_anyway
        case Disposition.STOP:
            undecided = at[Level.INCONCLUSIVE] if known.hold_obstacle else set()
            assert at[Level.FAULTY] | undecided
    assert ending.exit_code is exit_code(verdict)


@given(st.data())
def test_slow_nodes_alone_never_put_a_job_where_it_waits_unless_it_was_asked_to(
    data: st.DataObject,
) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1))
    levels = st.sampled_from([Level.HEALTHY, Level.SLOW])
    verdict = verdict_of(**{name: data.draw(levels) for name in names})
    policy = replace(data.draw(POLICIES), on_straggler=OnStraggler.EXCLUDE)
    known = replace(data.draw(facts_of(verdict)), wait="it would have to wait")

    ending = decided(verdict, policy, known).ending

    assert ending.disposition is Disposition.PROCEED
    assert ending.may_stay or decided(verdict, policy, known).shrink is None


@given(st.data())
def test_slurm_is_asked_for_other_nodes_only_where_its_answer_decides(data: st.DataObject) -> None:
    verdict = data.draw(verdicts())
    policy = data.draw(POLICIES)
    known = data.draw(facts_of(verdict))

    asked = asked_about(verdict, policy, known)
    could, would_wait = (
        decided(verdict, policy, replace(known, wait=wait)) for wait in ("", "it would have to")
    )

    assert (could == would_wait) is (asked is None)
    if asked is not None:
        slow = set(verdict_nodes(verdict, Level.SLOW))
        assert could.ending.disposition is Disposition.REQUEUE
        assert set(asked.leave) == set(could.ending.nodes)
        assert asked.leave[0] in slow
        assert not set(asked.keep) & set(asked.leave)
        assert len({*asked.keep, *asked.leave}) == len(verdict.nodes)


def test_a_faulty_node_is_drained_and_then_the_job_requeued_without_it() -> None:
    assert decided(ONE_FAULTY, Policy(), job_facts()) == Decision(
        drains=(Drain(node="n2", component="network", reason="network: no allgather"),),
        ending=Ending(
            disposition=Disposition.REQUEUE,
            exit_code=ExitCode.BAD_NODES,
            reason="n2: no allgather",
            nodes=("n2",),
        ),
    )


def test_too_many_bad_nodes_at_once_are_not_drained() -> None:
    verdict = verdict_of(n1=Level.FAULTY, n2=Level.FAULTY, n3=Level.FAULTY, n4=Level.HEALTHY)

    decision = decided(verdict, Policy(max_bad_share=0.5), job_facts())

    assert decision.drains == (
        LeaveAlone(
            nodes=("n1", "n2", "n3"),
            reason="3 of 4 nodes bad at once: probably a fabric or software problem",
        ),
    )


@pytest.mark.parametrize(
    ("candidates", "asked", "said"),
    [
        (frozenset({"n1", "n2", "n3"}), 3, "--exclude=n2, on 2 nodes at most (--nodes=2)"),
        (frozenset({"n1", "n2", "n3", "n4"}), 3, "--exclude=n2"),  # n1, n3 and n4 are enough
        (None, 3, "--exclude=n2"),  # nobody knows which nodes there are
    ],
)
def test_a_job_that_stops_is_told_to_ask_for_no_more_nodes_than_there_are(
    candidates: frozenset[str] | None, asked: int, said: str
) -> None:
    known = job_facts(candidates=candidates, asked=asked, requeues=3)

    last = decided(ONE_FAULTY, Policy(), known).ending

    assert last.disposition is Disposition.STOP
    assert last.reason.endswith(f"submit the job again with {said}")


def test_a_job_that_asks_for_its_bad_node_by_name_is_told_to_ask_for_it_no_more() -> None:
    known = job_facts(named=frozenset({"n1", "n2"}))

    last = decided(ONE_FAULTY, Policy(), known).ending

    assert last.disposition is Disposition.STOP
    assert last.reason.endswith("submit the job again without n2 in --nodelist")


def test_a_job_of_a_user_who_asked_for_no_check_runs_on_the_bad_node_that_it_names() -> None:
    known, policy = (
        job_facts(named=frozenset({"n2"})),
        Policy(at_requeue_limit=AtRequeueLimit.START),
    )

    last = decided(ONE_FAULTY, policy, known).ending

    assert last.disposition is Disposition.PROCEED
    assert "it asks for n2 by name (--nodelist); starting anyway" in last.reason


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (job_facts(wait="it would have to wait for 1 other node"), "for 1 other node"),
        (job_facts(requeues=3), "the limit is 3"),
        (job_facts(hold_obstacle="it is not a batch job"), "it is not a batch job"),
        (job_facts(named=frozenset({"n2"})), "by name (--nodelist)"),
        (job_facts(candidates=frozenset({"n1", "n2", "n3"}), asked=3), "has 2 nodes without n2"),
    ],
)
@pytest.mark.parametrize("at_limit", AtRequeueLimit)
def test_a_job_that_cannot_leave_a_slow_node_at_once_runs_on_it_and_says_what_that_costs(
    known: JobFacts, why: str, at_limit: AtRequeueLimit
) -> None:
    healthy = [NodeVerdict(node=node, level=Level.HEALTHY) for node in ("n1", "n3")]
    slow = NodeVerdict(
        node="n2",
        level=Level.SLOW,
        slowdown=2.14,
        component="network",
        reason="allgather slow with n1 (12 ms, healthy pairs 5.6 ms)",
    )

    decision = decided(
        VerdictReached(nodes=[*healthy, slow]), Policy(at_requeue_limit=at_limit), known
    )

    assert decision.ending.disposition is Disposition.PROCEED
    said = decision.ending.reason
    assert said.startswith("n2: allgather slow with n1 (12 ms, healthy pairs 5.6 ms); ")
    assert why in said
    assert said.endswith(
        "continuing with n2 anyway: each step may take up to 2.1 times as long (network)"
    )


@pytest.mark.parametrize("choice", [OnStraggler.REQUEUE, OnStraggler.DRAIN])
def test_a_job_that_is_to_wait_for_other_nodes_waits_at_its_limit_too(choice: OnStraggler) -> None:
    verdict = verdict_of(n1=Level.HEALTHY, n2=Level.SLOW)
    policy = Policy(on_straggler=choice, at_requeue_limit=AtRequeueLimit.HOLD)

    assert decided(verdict, policy, job_facts(requeues=3)).ending.disposition is Disposition.HOLD


@pytest.mark.parametrize("where", ["paths", "leaves"])
def test_a_bad_link_is_a_finding_although_every_node_is_well(where: str) -> None:
    link = [LinkVerdict(ends=("n1", "n2"), level=Level.SLOW, slowdown=1.82)]
    verdict = VerdictReached(
        nodes=[NodeVerdict(node="n1", level=Level.HEALTHY)],
        paths=link if where == "paths" else [],
        leaves=link if where == "leaves" else [],
    )

    assert exit_code(verdict) is ExitCode.BAD_NODES
    decision = decided(verdict, Policy(), job_facts())
    assert decision.ending.disposition is Disposition.PROCEED
    assert decision.ending.reason == (
        "the connection n1-n2 is bad, no node is to blame: each step may take up to 1.82 times as"
        " long (network)"
    )


def test_of_nodes_that_are_as_well_those_where_it_hung_are_given_back() -> None:
    policy = Policy(nodes_wanted=2, nodes_needed=2, last_choice=("n2",))
    well = verdict_of(n1=Level.HEALTHY, n2=Level.HEALTHY, n3=Level.HEALTHY)

    shrink = decided(well, policy, job_facts()).shrink

    assert shrink is not None
    assert (shrink.keep, shrink.drop) == (("n1", "n3"), ("n2",))


def test_a_faulty_node_goes_before_one_where_it_only_hung() -> None:
    policy = Policy(
        nodes_wanted=2,
        nodes_needed=2,
        max_requeues=0,
        at_requeue_limit=AtRequeueLimit.START,
        last_choice=("n2",),
    )
    verdict = verdict_of(n1=Level.FAULTY, n2=Level.SLOW, n3=Level.FAULTY)

    shrink = decided(
        verdict, policy, job_facts(requeues=1, held_for=frozenset({"n1", "n3"}))
    ).shrink

    assert shrink is not None
    assert (shrink.keep, shrink.drop) == (("n1", "n2"), ("n3",))
