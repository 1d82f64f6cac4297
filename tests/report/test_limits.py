# SPDX-License-Identifier: Apache-2.0
"""How slow a node had to be to be called slow, as a report tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.charts import charts_of
from slurm_health.report.find import load
from slurm_health.report.limits import limit_of
from slurm_health.report.table import job_text
from tests.support.journals import RunJournal

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
    allgather, matmul = charts_of(report.runs[0])
    assert matmul.limit.endswith(raised)
    assert allgather.limit.endswith("slow if it takes 8 % longer")


def test_the_limit_of_a_model_and_of_parts_is_that_of_their_probe(tmp_path: Path) -> None:
    slow_node(tmp_path, {"matmul on NVIDIA H200": 0.2, "matmulish": 0.9})

    assert limit_of(load(tmp_path, "12").runs[0], "matmul").floor == pytest.approx(0.2)


def test_an_older_journal_that_names_no_limit_has_the_usual_one(tmp_path: Path) -> None:
    slow_node(tmp_path, {})

    report = load(tmp_path, "12")

    assert not limit_of(report.runs[0], "matmul").raised
    assert "limit  " not in job_text(report)
