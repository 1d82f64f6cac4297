# SPDX-License-Identifier: Apache-2.0

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from slurm_health.preflight.decide.decide import decide, exit_code, unwanted
from slurm_health.preflight.decide.facts import JobFacts, requeue_obstacle
from slurm_health.preflight.decide.policy import OnStraggler, Policy
from slurm_health.records.records import Disposition, VerdictReached
from slurm_health.records.verdict import (
    Level,
    LinkVerdict,
    StorageBlame,
    StorageVerdict,
)
from tests.frozen.deciding import shown, verdict_of
from tests.strategies import verdicts

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


def names_at(verdict: VerdictReached, level: Level) -> set[str]:
    return {node.node for node in verdict.nodes if node.level is level}


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


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """A verdict on n1, n2, ..., a letter for each, and what is decided and said of it."""

    nodes: str
    is_: str = msgspec.field(name="is")
    says: list[str]
    links: list[tuple[str, str, Level, float]] = []
    component: str = ""
    storage: list[StorageBlame] = []
    uplinks: list[str] = []
    policy: dict[str, object] = {}
    facts: dict[str, object] = {}

    def verdict(self) -> VerdictReached:
        found = verdict_of(self.nodes, *self.links)
        nodes = [structs.replace(n, component=self.component or n.component) for n in found.nodes]
        uplinks = [
            LinkVerdict(ends=(end,), level=Level.SLOW, slowdown=1.82) for end in self.uplinks
        ]
        storage = [
            StorageVerdict(path="/ckpt", blame=blame, level=Level.FAULTY, reason="/ckpt hangs")
            for blame in self.storage
        ]
        return VerdictReached(nodes=nodes, paths=found.paths, leaves=uplinks, storage=storage)


CASES = msgspec.json.decode(
    (Path(__file__).parents[2] / "data" / "decisions.json").read_bytes(), type=dict[str, Case]
)
USUAL = {"job_id": 12, "batch_node": "n1", "partition": "main", "needed": 4, "free": 1000}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_decided_is_said_with_its_reason(case: Case) -> None:
    """The slow ones are a table in docs/howto/what-happens-to-my-job.md."""
    verdict = case.verdict()
    facts = msgspec.convert({**USUAL, "may_drain": True, **case.facts}, JobFacts)

    decision = decide(verdict, msgspec.convert(case.policy, Policy), facts)

    drains = [drain.reason for drain in decision.drain]
    said = "\n".join([decision.left_alone[1], decision.drop[1], *drains, decision.outcome.reason])
    assert shown(decision) == case.is_
    assert [words for words in case.says if words not in f"{said}$"] == []
