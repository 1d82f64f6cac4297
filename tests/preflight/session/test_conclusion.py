# SPDX-License-Identifier: Apache-2.0
"""From verdicts of phases, and what else is known of nodes, to the record of a verdict."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slurm_health.preflight.session.conclusion import Known, concluded, merged
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Verdict
from tests.support.rows import rows

WELL = {name: {"level": "healthy", "reason": "passed"} for name in ("n1", "n2", "n3")}


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """Verdicts on nodes, well ones by default, what else is known, and what comes of both."""

    known: Known
    is_: dict[str, dict[str, Any]] = msgspec.field(name="is")
    nodes: dict[str, dict[str, Any]] = {}


@rows
def test_what_is_known_of_nodes_beside_their_times_is_in_their_verdicts(case: Case) -> None:
    judged = {
        name: msgspec.convert({"node": name, **of_node}, NodeVerdict)
        for name, of_node in (case.nodes or WELL).items()
    }

    record = concluded(list(judged), Verdict(nodes=judged), case.known, [])

    for node in record.nodes:
        found = {"component": "", "evidence": [], **msgspec.json.decode(msgspec.json.encode(node))}
        expected = dict(case.is_.get(node.node, {}))
        assert expected.pop("says", "") in node.reason
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_node_or_path_is_as_bad_as_its_worst_phase_and_a_node_has_the_evidence_of_all(
    order: tuple[int, int],
) -> None:
    well = NodeVerdict(node="n1", level=Level.HEALTHY, reason="well", evidence=("a",))
    slow = NodeVerdict(
        node="n1", level=Level.SLOW, slowdown=1.4, reason="copy slow", evidence=("b",)
    )
    noted = replace(well, node="n2", slowdown=1.07, reason="device 3 is 7 %")
    doubt, cut = (
        LinkVerdict(ends=("n1", "n2"), level=level) for level in (Level.INCONCLUSIVE, Level.FAULTY)
    )
    both = (
        Verdict(nodes={"n1": well, "n2": noted}, paths=(doubt,)),
        Verdict(nodes={"n1": slow, "n2": replace(well, node="n2")}, paths=(cut,)),
    )

    found = merged([both[at] for at in order])

    nodes = [(node.level, node.reason, node.slowdown) for node in found.nodes.values()]
    assert nodes == [(Level.SLOW, "copy slow", 1.4), (Level.HEALTHY, "device 3 is 7 %", 1.07)]
    assert set(found.nodes["n1"].evidence) == {"a", "b"}
    assert found.paths == (cut,)


def test_every_node_is_judged_once_in_the_order_of_the_run_by_all_that_is_known() -> None:
    verdict = Verdict(
        nodes={
            "n2": NodeVerdict(node="n2", level=Level.HEALTHY, reason="well", evidence=("a",)),
            "n1": NodeVerdict(node="n1", level=Level.SLOW, slowdown=1.23456, evidence=("round 0",)),
        },
        paths=(LinkVerdict(ends=("n1", "n2"), level=Level.FAULTY, probability=0.99999),),
        leaves=(LinkVerdict(ends=("s1",), level=Level.SLOW, slowdown=2.0),),
    )
    others = [
        NodeVerdict(node="n3", level=Level.INCONCLUSIVE, probability=0.0),
        NodeVerdict(
            node="n2", level=Level.FAULTY, component="device", reason="lost", evidence=("lost",)
        ),
    ]

    record = concluded(["n1", "n2", "n3"], verdict, Known(), others)

    assert [(node.node, node.level) for node in record.nodes] == [
        ("n1", Level.SLOW),
        ("n2", Level.FAULTY),
        ("n3", Level.INCONCLUSIVE),
    ]
    assert record.nodes[0].slowdown == 1.235
    assert record.nodes[0].evidence == ("round 0",)
    apart = record.nodes[1]
    assert (apart.component, apart.reason, apart.evidence) == ("device", "lost", ("a", "lost"))
    assert [path.ends for path in record.paths] == [("n1", "n2")]
    assert [leaf.ends for leaf in record.leaves] == [("s1",)]
