# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_health.preflight.session.conclusion import (
    Absence,
    judged,
    merged,
    unmeasured,
    with_devices,
    with_interfaces,
    with_others,
    with_wrong_results,
)
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict, Verdict


def test_a_device_that_fails_where_most_do_not_is_a_fault_of_its_node_in_its_own_words() -> None:
    said = "device 3: ECC error"
    verdict = unmeasured("n1", Absence(failed=said, device_failed=said))

    assert (verdict.level, verdict.component) == (Level.FAULTY, "device")
    assert verdict.reason == "device 3: ECC error; most nodes can use theirs"
    assert verdict.evidence


def test_where_slurm_can_start_nothing_at_all_no_node_is_to_blame() -> None:
    verdict = unmeasured(
        "n1", Absence(could_not_start=True, others_started=False, lost="no answer")
    )

    assert verdict.level is Level.INCONCLUSIVE


@given(
    st.fixed_dictionaries(
        {
            "others_started": st.booleans(),
            "lost": st.text(),
            "failed": st.text(),
            "started": st.booleans(),
            "stack": st.text(),
        }
    )
)
def test_what_could_not_be_measured_is_never_healthy_and_never_a_fault(
    known: dict[str, Any],
) -> None:
    verdict = unmeasured("n1", Absence(**known))

    assert verdict.level is Level.INCONCLUSIVE
    assert verdict.probability == 0.0
    assert verdict.reason


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({}, "could not be measured: its agent never reported"),
        ({"started": True}, "could not be measured: its check processes were not ready in time"),
        ({"lost": "its master died"}, "could not be measured: its master died"),
        ({"failed": "no torch", "lost": "left"}, "could not be measured: no torch"),
        ({"stack": "torch 2.4"}, "not compared: torch 2.4 there, unlike the other nodes"),
    ],
)
def test_the_reason_is_the_most_telling_one(known: dict[str, Any], reason: str) -> None:
    verdict = unmeasured("n1", Absence(**known))

    assert verdict.reason.startswith(reason)


def test_a_node_that_others_crowd_is_not_judged_as_its_job_would_find_it() -> None:
    well = NodeVerdict(node="n1", level=Level.HEALTHY, reason="passed with 3 partners")
    verdict = Verdict(nodes={name: replace(well, node=name) for name in ("n1", "n2", "n3")})

    nodes = with_others(verdict, {"n1": 0.3, "n2": 0.9, "n3": 1.0}).nodes

    assert nodes["n1"].level is Level.INCONCLUSIVE
    assert nodes["n1"].reason == (
        "others had its processors 70% of the time (on most nodes 10%), which is left out;"
        " passed with 3 partners"
    )
    assert nodes["n2"].level is nodes["n3"].level is Level.HEALTHY


def test_where_all_nodes_are_crowded_alike_that_is_usual_there() -> None:
    well = NodeVerdict(node="n1", level=Level.HEALTHY, reason="passed")
    verdict = Verdict(nodes={"n1": well, "n2": replace(well, node="n2")})

    assert with_others(verdict, {"n1": 0.2, "n2": 0.3}) == verdict


WRONG = "device 3 computes wrong results"


@pytest.mark.parametrize(
    ("wrong", "exact", "level"),
    [
        (["n1"], ["n2", "n3"], Level.FAULTY),
        (["n1"], ["n1", "n2", "n3"], Level.FAULTY),  # right at other times
        (["n1"], ["n2"], Level.FAULTY),
        (["n1"], ["n1"], Level.FAULTY),
        (["n1"], [], Level.INCONCLUSIVE),
        (["n1", "n2"], [], Level.INCONCLUSIVE),
        (["n1", "n2"], ["n3"], Level.INCONCLUSIVE),
        (["n1", "n2"], ["n1", "n2"], Level.INCONCLUSIVE),
    ],
)
def test_one_wrong_result_is_proof_where_others_are_right_and_never_healthy(
    wrong: list[str], exact: list[str], level: Level
) -> None:
    names = ("n1", "n2", "n3")
    healthy = {name: NodeVerdict(node=name, level=Level.HEALTHY) for name in names}

    verdict = with_wrong_results(Verdict(nodes=healthy), {name: [WRONG] for name in wrong}, exact)

    found = verdict.nodes["n1"]
    assert (found.level, WRONG in found.reason, found.evidence) == (level, True, (WRONG,))
    assert (found.component == "compute") is (level is Level.FAULTY)
    assert {verdict.nodes[name].level for name in names if name not in wrong} <= {Level.HEALTHY}


def test_every_node_is_judged_once_in_the_order_of_the_run() -> None:
    verdict = Verdict(
        nodes={
            "n2": NodeVerdict(node="n2", level=Level.HEALTHY, reason="well"),
            "n1": NodeVerdict(node="n1", level=Level.SLOW, slowdown=1.23456, evidence=("round 0",)),
        },
        paths=(LinkVerdict(ends=("n1", "n2"), level=Level.FAULTY, probability=0.99999),),
        leaves=(LinkVerdict(ends=("s1",), level=Level.SLOW, slowdown=2.0),),
    )
    others = {"n3": NodeVerdict(node="n3", level=Level.INCONCLUSIVE, probability=0.0)}

    record = judged(["n1", "n2", "n3"], verdict, others)

    assert [(node.node, node.level) for node in record.nodes] == [
        ("n1", Level.SLOW),
        ("n2", Level.HEALTHY),
        ("n3", Level.INCONCLUSIVE),
    ]
    assert record.nodes[0].slowdown == 1.235
    assert record.nodes[0].evidence == ("round 0",)
    assert [path.ends for path in record.paths] == [("n1", "n2")]
    assert [leaf.ends for leaf in record.leaves] == [("s1",)]


@pytest.mark.parametrize("noted_first", [True, False])
def test_what_a_healthy_node_is_slower_in_is_told_whichever_phase_saw_it(
    *, noted_first: bool
) -> None:
    noted = NodeVerdict(node="n1", level=Level.HEALTHY, slowdown=1.07, reason="device 3 is 7 %")
    plain = NodeVerdict(node="n1", level=Level.HEALTHY, reason="passed with 2 partners")
    phases = [noted, plain] if noted_first else [plain, noted]

    found = merged([Verdict(nodes={"n1": phase}) for phase in phases]).nodes["n1"]

    assert (found.level, found.reason, found.slowdown) == (Level.HEALTHY, "device 3 is 7 %", 1.07)


def test_what_was_found_apart_from_the_verdict_is_added_to_what_it_says_of_the_node() -> None:
    healthy = NodeVerdict(node="n1", level=Level.HEALTHY, reason="well", evidence=("round 0",))
    broken = NodeVerdict(
        node="n1", level=Level.FAULTY, component="device", reason="lost", evidence=("lost",)
    )

    (found,) = judged(["n1"], Verdict(nodes={"n1": healthy}), {"n1": broken}).nodes

    assert (found.level, found.component, found.reason) == (Level.FAULTY, "device", "lost")
    assert found.evidence == ("round 0", "lost")


def test_a_device_that_a_verdict_names_by_its_place_is_named_by_its_address_too() -> None:
    devices = ["H100 GPU-0a at 0000:19:00.0", "H100 GPU-1b at 0000:3b:00.0"]
    slow = NodeVerdict(
        node="n1", level=Level.SLOW, component="compute device 1", reason="matmul:device 1 2.00x"
    )
    well = replace(slow, node="n2", level=Level.HEALTHY)
    verdict = Verdict(nodes={"n1": slow, "n2": well})

    found = with_devices(verdict, {"n1": devices, "n2": devices}).nodes

    assert found["n1"].reason == f"matmul:device 1 2.00x; device 1 is {devices[1]}"
    assert found["n1"].evidence == (f"device 1 is {devices[1]}",)
    assert found["n2"] == well
    assert with_devices(verdict, {"n1": devices[:1]}) == verdict


def test_the_interface_is_named_where_an_exchange_failed_and_the_node_is_not_healthy() -> None:
    bad, doubted, well = (
        NodeVerdict(node=node, level=level, reason=reason)
        for node, level, reason in (
            ("n1", Level.FAULTY, "no allgather with n2"),
            ("n2", Level.INCONCLUSIVE, "timed out"),
            ("n3", Level.HEALTHY, "passed"),
        )
    )
    verdict = Verdict(nodes={each.node: each for each in (bad, doubted, well)})

    found = with_interfaces(verdict, {"n1": "NCCL_SOCKET_IFNAME=docker0", "n3": "eth0"})

    assert [each.reason for each in found.nodes.values()] == [
        "no allgather with n2; connects over NCCL_SOCKET_IFNAME=docker0",
        "timed out",
        "passed",
    ]
