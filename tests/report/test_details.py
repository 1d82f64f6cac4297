# SPDX-License-Identifier: Apache-2.0
"""What stands behind the verdicts: the part at fault, what was measured, the rounds, samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.records import DevicesWatched, NodeReported, VerdictReached, WorkersReady
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.details import limit_of
from slurm_health.report.read import load
from slurm_health.report.table import job_text
from tests.support.journals import RunJournal, write_healthy_run

UUID = "GPU-6c2fe2a4-0000"
TIMES = "1.42 times slower than its peers"


def block(text: str, head: str) -> list[str]:
    """Return the lines of one block of a report."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(head)]
    return found.splitlines()


def hot_device(root: Path) -> RunJournal:
    """Write a check in which GPU 1 of n1 was too hot."""
    run = RunJournal(root, nodes=["n1", "n2"])
    run.start()
    ready = WorkersReady(
        node="n1",
        launch=0,
        store_port=1,
        torch="2.6.0",
        backend="nccl",
        devices=["cuda:0", "cuda:1"],
        model="NVIDIA H100",
        interface="ib0",
    )
    burns = [
        Burn(index=index, uuid=f"{UUID}{index}", bus=f"0000:{index}b:00.0", samples=9)
        for index in (0, 1)
    ]
    hot = Burn(
        index=1,
        uuid=f"{UUID}1",
        bus="0000:1b:00.0",
        samples=9,
        reasons=HARDWARE_THERMAL,
        reason_samples={HARDWARE_THERMAL: 7},
        max_temperature_c=93,
    )
    run.write("n1", ready, DevicesWatched(node="n1", round=0, devices=[burns[0], hot]))
    run.judge(
        NodeVerdict(
            node="n1",
            level=Level.SLOW,
            slowdown=1.42,
            component="compute device 1",
            reason="matmul:device 1 1.42x slower than its peers (2.3 ms, peers 1.6 ms)",
            evidence=tuple(f"round {number} alone: matmul 2.3 ms" for number in range(9)),
        )
    )
    return run


def test_a_slow_device_is_named_by_its_uuid_and_its_pci_address(tmp_path: Path) -> None:
    hot_device(tmp_path)

    lines = block(job_text(load(tmp_path, "12")), "EVIDENCE")

    assert lines[1].split(maxsplit=2) == [
        "n1",
        "part",
        f"compute device 1 (GPU 1 {UUID}1 at 0000:1b:00.0, NVIDIA H100), {TIMES}",
    ]
    assert f"GPU 1 ({UUID}1): hardware thermal slowdown during the burn, 93 C" in lines[-1]


def test_a_network_is_named_by_its_interface_and_not_by_the_processor(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    ready = WorkersReady(
        node="n1",
        launch=0,
        store_port=1,
        torch="2.6.0",
        backend="gloo",
        devices=["cpu"],
        model="cpu with 1 thread",
        interface="eth0",
    )
    run.write("n1", ready)
    run.judge(NodeVerdict(node="n1", level=Level.FAULTY, component="network", reason="no answer"))

    lines = block(job_text(load(tmp_path, "12")), "EVIDENCE")
    assert lines[1].split(maxsplit=2) == ["n1", "part", "network (interface eth0)"]


def test_the_latest_evidence_is_told_and_all_of_it_on_request(tmp_path: Path) -> None:
    hot_device(tmp_path)
    report = load(tmp_path, "12")

    short, whole = (job_text(report, verbose=verbose) for verbose in (False, True))

    assert "round 8 alone" in short
    assert "round 0 alone" not in short
    assert "and 3 more: --verbose shows all" in short
    assert "round 0 alone" in whole


def test_every_group_is_named_on_request(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)

    lines = block(job_text(load(tmp_path, "12"), verbose=True), "TIMELINE")

    assert lines[2].endswith("n1+n2 measured; n4+n5 measured; elapsed n[1-2,4-5] 1.6 s")


def test_every_sample_is_told_on_request(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)

    lines = block(job_text(load(tmp_path, "12"), verbose=True), "SAMPLES")

    assert len(lines) == 1 + 2 * 4 * 2
    assert lines[1].split() == ["n1", "0/0", "matmul", "0", "n2", "43", "43", "43"]


def test_of_hundreds_of_bad_nodes_the_first_are_told_and_the_rest_named(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=[f"n{number:03}" for number in range(1, 201)])
    run.start()
    run.begin_round(0, [[node] for node in run.nodes])
    for node in run.nodes:
        run.write(node, NodeReported(node=node, round=0, outcome=Outcome.FAILED, detail="no GPU"))
    run.end_round(0)
    run.judge(
        *(
            NodeVerdict(
                node=node, level=Level.FAULTY, reason="no GPU", evidence=("round 0 alone: no GPU",)
            )
            for node in run.nodes
        )
    )

    text = job_text(load(tmp_path, "12"), width=80)

    assert "and n[013-200]: --verbose shows all" in text
    assert "194 more like these" in " ".join(text.split())
    assert len(text.splitlines()) < 40


NODES = [f"n{number}" for number in range(1, 11)]


def slow_node(root: Path, floors: dict[str, float]) -> None:
    """Write a check in which n2 is slow, with these limits."""
    run = RunJournal(root, nodes=NODES)
    run.start()
    run.begin_round(0, [NODES[index : index + 2] for index in range(0, 10, 2)])
    for index in range(0, 10, 2):
        run.measure(0, NODES[index : index + 2])
    run.end_round(0)
    reason = "matmul 1.33x slower than its peers (2.3 ms, peers 1.7 ms)"
    judged = [NodeVerdict(node=node, level=Level.HEALTHY) for node in NODES]
    judged[1] = NodeVerdict(
        node="n2",
        level=Level.SLOW,
        slowdown=1.33,
        component="compute",
        reason=reason,
        evidence=("round 0 with n1: matmul 2.3 ms",),
    )
    run.master(VerdictReached(nodes=judged, floors=floors))


def test_a_limit_that_the_devices_raised_is_told_with_why(tmp_path: Path) -> None:
    slow_node(tmp_path, {"matmul": 0.163, "allgather": 0.08})

    report = load(tmp_path, "12")

    raised = "slow if it takes 16 % longer, raised from 12 %: the devices here differ that much"
    assert f"limit  matmul: {raised}" in job_text(report)


def test_the_limit_of_a_model_and_of_parts_is_that_of_their_probe(tmp_path: Path) -> None:
    slow_node(tmp_path, {"matmul on NVIDIA H200": 0.2, "matmulish": 0.9})

    assert limit_of(load(tmp_path, "12").runs[0], "matmul").floor == pytest.approx(0.2)
