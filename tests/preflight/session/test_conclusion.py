# SPDX-License-Identifier: Apache-2.0
"""From verdicts of phases, and what else is known of nodes, to the record of a verdict."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_health.preflight.session.conclusion import Known, concluded, merged
from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Verdict
from tests.support.rows import rows

WRONG = "device 3 computes wrong results"
WELL = {
    name: NodeVerdict(node=name, level=Level.HEALTHY, reason="passed")
    for name in ("n1", "n2", "n3")
}


def judged(nodes: dict[str, NodeVerdict], known: Known) -> dict[str, NodeVerdict]:
    """Return the verdicts on nodes of which this is known."""
    record = concluded(list(nodes), Verdict(nodes=nodes), known, [])
    return {node.node: node for node in record.nodes}


def test_a_node_that_others_crowd_is_not_judged_as_its_job_would_find_it() -> None:
    nodes = judged(WELL, Known(served={"n1": 0.3, "n2": 0.9, "n3": 1.0}))

    assert nodes["n1"].level is Level.INCONCLUSIVE
    assert nodes["n1"].reason == (
        "other processes used its processors 70 % of the time (10 % on most nodes),"
        " which is not counted; passed"
    )
    assert nodes["n2"].level is nodes["n3"].level is Level.HEALTHY


def test_where_all_nodes_are_crowded_alike_that_is_usual_there() -> None:
    assert judged(WELL, Known(served={"n1": 0.2, "n2": 0.3, "n3": 0.2})) == WELL


@rows
def test_one_wrong_result_is_proof_where_others_are_right_and_never_healthy(
    wrong: list[str], exact: list[str], level: Level
) -> None:
    nodes = judged(WELL, Known(wrong_results={name: [WRONG] for name in wrong}, exact=exact))

    first = nodes["n1"]
    assert (first.level, WRONG in first.reason, first.evidence) == (level, True, (WRONG,))
    assert (first.component == "compute") is (level is Level.FAULTY)
    assert {nodes[name].level for name in WELL if name not in wrong} <= {Level.HEALTHY}


def test_what_a_throttled_gpu_reported_explains_and_does_not_convict() -> None:
    throttled = Burn(
        index=3, uuid="GPU-7", bus="", samples=9, reason_samples={HARDWARE_THERMAL: 9}, reasons=64
    )

    node = judged(WELL, Known(burns={"n1": [throttled]}))["n1"]

    assert node.level is Level.HEALTHY
    assert "GPU 3 (GPU-7): hardware thermal slowdown" in node.reason


def test_memory_errors_that_were_not_corrected_are_proof() -> None:
    broken = Burn(index=0, uuid="GPU-1", bus="", samples=9, uncorrected=2)

    node = judged(WELL, Known(burns={"n1": [broken]}))["n1"]

    assert (node.level, node.component) == (Level.FAULTY, "memory")
    assert node.evidence


def test_the_way_that_data_went_is_named_where_the_network_is_slow_and_nowhere_else() -> None:
    nodes = {
        name: NodeVerdict(node=name, level=level, component=component, reason="slow")
        for name, level, component in (
            ("n1", Level.SLOW, "network rail 3"),
            ("n2", Level.SLOW, "compute device 1"),
            ("n3", Level.HEALTHY, "network"),
        )
    }

    verdicts = judged(nodes, Known(transports=dict.fromkeys(nodes, "NET/Socket")))

    assert [verdicts[name].reason for name in nodes] == [
        "slow; data went over NET/Socket",
        "slow",
        "slow",
    ]


def test_a_device_that_a_verdict_names_by_its_place_is_named_by_its_address_too() -> None:
    devices = ["H100 GPU-0a at 0000:19:00.0", "H100 GPU-1b at 0000:3b:00.0"]
    slow = NodeVerdict(
        node="n1", level=Level.SLOW, component="compute device 1", reason="matmul:device 1 2.00x"
    )
    nodes = {"n1": slow, "n2": replace(slow, node="n2", level=Level.HEALTHY)}

    verdicts = judged(nodes, Known(devices={"n1": devices, "n2": devices}))

    assert verdicts["n1"].reason == f"matmul:device 1 2.00x; device 1 is {devices[1]}"
    assert verdicts["n1"].evidence == (f"device 1 is {devices[1]}",)
    assert verdicts["n2"] == nodes["n2"]
    assert judged(nodes, Known(devices={"n1": devices[:1]})) == nodes


def test_the_interface_is_named_where_an_exchange_failed_and_the_node_is_not_healthy() -> None:
    nodes = {
        node: NodeVerdict(node=node, level=level, reason=reason)
        for node, level, reason in (
            ("n1", Level.FAULTY, "no allgather with n2"),
            ("n2", Level.INCONCLUSIVE, "timed out"),
            ("n3", Level.HEALTHY, "passed"),
        )
    }
    interfaces = {"n1": "NCCL_SOCKET_IFNAME=docker0", "n3": "eth0"}

    assert [each.reason for each in judged(nodes, Known(interfaces=interfaces)).values()] == [
        "no allgather with n2; connects over NCCL_SOCKET_IFNAME=docker0",
        "timed out",
        "passed",
    ]


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


def test_every_node_is_judged_once_in_the_order_of_the_run() -> None:
    verdict = Verdict(
        nodes={
            "n2": NodeVerdict(node="n2", level=Level.HEALTHY, reason="well"),
            "n1": NodeVerdict(node="n1", level=Level.SLOW, slowdown=1.23456, evidence=("round 0",)),
        },
        paths=(LinkVerdict(ends=("n1", "n2"), level=Level.FAULTY, probability=0.99999),),
        leaves=(LinkVerdict(ends=("s1",), level=Level.SLOW, slowdown=2.0),),
    )
    others = [NodeVerdict(node="n3", level=Level.INCONCLUSIVE, probability=0.0)]

    record = concluded(["n1", "n2", "n3"], verdict, Known(), others)

    assert [(node.node, node.level) for node in record.nodes] == [
        ("n1", Level.SLOW),
        ("n2", Level.HEALTHY),
        ("n3", Level.INCONCLUSIVE),
    ]
    assert record.nodes[0].slowdown == 1.235
    assert record.nodes[0].evidence == ("round 0",)
    assert [path.ends for path in record.paths] == [("n1", "n2")]
    assert [leaf.ends for leaf in record.leaves] == [("s1",)]


def test_what_was_found_apart_from_the_verdict_is_added_to_what_it_says_of_the_node() -> None:
    healthy = NodeVerdict(node="n1", level=Level.HEALTHY, reason="well", evidence=("round 0",))
    broken = NodeVerdict(
        node="n1", level=Level.FAULTY, component="device", reason="lost", evidence=("lost",)
    )

    (found,) = concluded(["n1"], Verdict(nodes={"n1": healthy}), Known(), [broken]).nodes

    assert (found.level, found.component, found.reason) == (Level.FAULTY, "device", "lost")
    assert found.evidence == ("round 0", "lost")
