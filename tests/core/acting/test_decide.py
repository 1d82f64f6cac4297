# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.core.acting.decide import (
    AtRequeueLimit,
    Disposition,
    Finish,
    Hold,
    OnInconclusive,
    OnStraggler,
    Policy,
    RequeueElsewhere,
    Shrink,
    Situation,
    decide,
    exit_code,
    unwanted,
)
from slurm_health.core.acting.drains import Drain, LeaveAlone, drain_reason
from slurm_health.core.records import VerdictReached
from slurm_health.core.text import REASON_LENGTH, REASON_PREFIX
from slurm_health.core.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.errors import ExitCode
from tests.strategies import verdicts
from tests.support.situations import situation

POLICIES = st.builds(
    Policy,
    max_requeues=st.integers(0, 4),
    on_straggler=st.sampled_from(OnStraggler),
    on_inconclusive=st.sampled_from(OnInconclusive),
    at_requeue_limit=st.sampled_from(AtRequeueLimit),
    max_bad_share=st.floats(0.0, 1.0),
    nodes_wanted=st.none() | st.integers(1, 8),
    nodes_needed=st.none() | st.integers(1, 8),
)


@st.composite
def situations(draw: st.DrawFn, verdict: VerdictReached) -> Situation:
    names = [node.node for node in verdict.nodes]
    return Situation(
        job_id=12,
        batch_node=names[0],
        requeues=draw(st.integers(0, 4)),
        requeue_obstacle=draw(st.sampled_from(["", "it is not a batch job"])),
        hold_obstacle=draw(st.sampled_from(["", "it is not a batch job"])),
        held_for=frozenset(draw(st.sets(st.sampled_from(names)))),
        may_drain=draw(st.booleans()),
        node_reasons=draw(st.dictionaries(st.sampled_from(names), st.text(max_size=9))),
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
    known = data.draw(situations(verdict))

    actions = decide(verdict, policy, known)

    at = {level: set(verdict_nodes(verdict, level)) for level in Level}
    bad = {node.node for node in unwanted(verdict, policy)} - (at[Level.INCONCLUSIVE])
    drains = [action for action in actions if isinstance(action, Drain)]
    drained = [name for action in drains for name in action.nodes]
    may_go = at[Level.FAULTY] | (
        at[Level.SLOW] if policy.on_straggler is OnStraggler.DRAIN else set()
    )
    assert len(drained) == len(set(drained))
    assert set(drained) <= may_go - set(known.node_reasons)
    assert not drained or known.may_drain
    assert len(drained) <= max(1, int(policy.max_bad_share * len(verdict.nodes)))
    assert all(action.reason.startswith(REASON_PREFIX) for action in drains)
    assert all(isinstance(action, Drain | LeaveAlone | Shrink) for action in actions[:-1])
    shrinks = [action for action in actions if isinstance(action, Shrink)]
    for shrink in shrinks:
        assert actions[-2] == shrink
        assert sorted([*shrink.keep, *shrink.drop]) == sorted(node.node for node in verdict.nodes)
        assert known.batch_node in shrink.keep
        assert not bad & set(shrink.keep)
        assert shrink.reason
    match actions[-1]:
        case RequeueElsewhere(exclude=exclude):
            assert bad <= set(exclude) <= bad | at[Level.INCONCLUSIVE]
            assert exclude
            assert not shrinks
            assert known.requeues < policy.max_requeues
            assert not known.requeue_obstacle
        case Hold(nodes=nodes):
            assert nodes
            assert not shrinks
            assert not known.hold_obstacle
            assert OnInconclusive.HOLD in {policy.on_inconclusive} or (
                policy.at_requeue_limit is AtRequeueLimit.HOLD
                and known.requeues >= policy.max_requeues
            )
        case Finish(disposition=disposition, exit_code=code, reason=reason):
            if disposition is Disposition.PROCEED and bad and not shrinks:
                assert policy.at_requeue_limit is AtRequeueLimit.START
                assert known.requeues >= policy.max_requeues
            if disposition is Disposition.STOP and not bad:
                assert known.hold_obstacle
            assert disposition is not Disposition.STOP or not shrinks
            assert code is exit_code(verdict)
            assert reason
        case last:
            pytest.fail(f"ends with {last}")


@given(st.data())
def test_undecided_and_healthy_nodes_cause_nothing_by_default(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1))
    harmless = st.sampled_from([Level.HEALTHY, Level.INCONCLUSIVE])
    verdict = verdict_of(**{name: data.draw(harmless) for name in names})

    policy = replace(data.draw(POLICIES), on_inconclusive=OnInconclusive.PROCEED)

    *before, last = decide(verdict, policy, data.draw(situations(verdict)))

    assert all(isinstance(action, Shrink) for action in before)
    assert isinstance(last, Finish)
    assert last.disposition is Disposition.PROCEED


def test_a_faulty_node_is_drained_and_then_the_job_requeued_without_it() -> None:
    assert decide(ONE_FAULTY, Policy(), situation()) == (
        Drain(nodes=("n2",), reason="slurm-health: job 12: network: no allgather"),
        RequeueElsewhere(exclude=("n2",), reason="n2: no allgather"),
    )


def test_without_rights_the_job_moves_away_and_nobody_is_drained() -> None:
    actions = decide(ONE_FAULTY, Policy(), situation(may_drain=False))

    assert [type(action) for action in actions] == [RequeueElsewhere]


@pytest.mark.parametrize("note", ["fan broken [root]", ""])
def test_another_ones_note_on_a_node_is_left_alone(note: str) -> None:
    actions = decide(ONE_FAULTY, Policy(), situation(node_reasons={"n2": note}))

    left, requeue = actions
    assert isinstance(left, LeaveAlone)
    assert isinstance(requeue, RequeueElsewhere)
    assert (note or "(no reason given)") in left.reason


def test_too_many_bad_nodes_at_once_are_not_drained() -> None:
    verdict = verdict_of(n1=Level.FAULTY, n2=Level.FAULTY, n3=Level.FAULTY, n4=Level.HEALTHY)

    actions = decide(verdict, Policy(max_bad_share=0.5), situation())

    assert actions[0] == LeaveAlone(
        nodes=("n1", "n2", "n3"),
        reason="3 of 4 nodes at once is a fabric or software problem",
    )


def test_nodes_with_the_same_note_are_drained_in_one_call() -> None:
    verdict = verdict_of(n1=Level.FAULTY, n2=Level.FAULTY, n3=Level.HEALTHY, n4=Level.HEALTHY)

    drains = [a for a in decide(verdict, Policy(), situation()) if isinstance(a, Drain)]

    assert [action.nodes for action in drains] == [("n1", "n2")]


def test_a_slow_node_is_left_but_never_drained() -> None:
    verdict = verdict_of(n1=Level.HEALTHY, n2=Level.SLOW)

    assert [type(a) for a in decide(verdict, Policy(), situation())] == [RequeueElsewhere]


def test_a_slow_node_is_only_reported_where_the_user_says_so() -> None:
    verdict = verdict_of(n1=Level.HEALTHY, n2=Level.SLOW)

    actions = decide(verdict, Policy(on_straggler=OnStraggler.REPORT), situation())

    assert actions == (
        Finish(
            disposition=Disposition.PROCEED,
            exit_code=ExitCode.BAD_NODES,
            reason="n2 slow, reported only",
        ),
    )


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (situation(requeues=3), "already requeued 3 times because of bad nodes, the limit is 3"),
        (situation(requeue_obstacle="it is not a batch job"), "n2 cannot be used"),
    ],
)
def test_a_job_that_cannot_move_stops_and_says_why(known: Situation, said: str) -> None:
    *_, last = decide(ONE_FAULTY, Policy(), known)

    assert isinstance(last, Finish)
    assert last.disposition is Disposition.STOP
    assert last.exit_code is ExitCode.BAD_NODES
    assert said in last.reason


@given(st.text(max_size=400), st.text(max_size=20))
def test_a_note_for_slurm_is_one_short_line_of_printable_ascii(reason: str, part: str) -> None:
    node = NodeVerdict(node="n1", level=Level.FAULTY, component=part, reason=reason)

    note = drain_reason(node, 12)

    assert note.startswith(f"{REASON_PREFIX} job 12: ")
    assert len(note) <= REASON_LENGTH
    assert note.isascii()
    assert note.isprintable()
    assert '"' not in note


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([Level.HEALTHY, Level.HEALTHY], ExitCode.HEALTHY),
        ([Level.HEALTHY, Level.INCONCLUSIVE], ExitCode.INCONCLUSIVE),
        ([Level.INCONCLUSIVE, Level.SLOW], ExitCode.BAD_NODES),
        ([Level.INCONCLUSIVE, Level.FAULTY], ExitCode.BAD_NODES),
    ],
)
def test_the_exit_code_is_that_of_the_worst_that_is_proven(
    levels: list[Level], code: ExitCode
) -> None:
    verdict = verdict_of(**{f"n{number}": level for number, level in enumerate(levels)})

    assert exit_code(verdict) is code


@pytest.mark.parametrize("where", ["paths", "leaves"])
def test_a_bad_link_is_a_finding_although_every_node_is_well(where: str) -> None:
    link = [LinkVerdict(ends=("n1", "n2"), level=Level.SLOW)]
    verdict = VerdictReached(
        nodes=[NodeVerdict(node="n1", level=Level.HEALTHY)],
        paths=link if where == "paths" else [],
        leaves=link if where == "leaves" else [],
    )

    assert exit_code(verdict) is ExitCode.BAD_NODES
    (finish,) = decide(verdict, Policy(), situation())
    assert "no node is to blame" in finish.reason
