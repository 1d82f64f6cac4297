# SPDX-License-Identifier: Apache-2.0
"""Nodes of which no two could exchange data are one finding."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from slurm_health.records.records import NodeReported
from slurm_health.records.script_records import ScriptStarted
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.read import load
from slurm_health.report.summary import summary_of
from slurm_health.system import journal
from tests.support.journals import Clock, RunJournal


@pytest.mark.parametrize(
    ("nodes", "found", "option"),
    [
        (["n1", "n2"], "n1 and n2 cannot exchange data", "--spares=1"),
        (["n1", "n2", "n3"], "no two of n[1-3] can exchange data", "--on-inconclusive=hold"),
    ],
)
def test_that_no_two_nodes_can_exchange_data_is_one_sentence_with_what_to_look_at(
    tmp_path: Path, nodes: list[str], found: str, option: str
) -> None:
    run = RunJournal(tmp_path, nodes=nodes)
    run.start()
    for index, pair in enumerate(combinations(nodes, 2)):
        run.begin_round(index, [pair])
        for node in pair:
            why = "allgather: connection closed by peer"
            run.write(
                node,
                NodeReported(
                    node=node, round=index, outcome=Outcome.FAILED, elapsed_ms=9.0, detail=why
                ),
            )
        run.end_round(index)
    level = Level.INCONCLUSIVE
    run.judge(*(NodeVerdict(node=node, level=level, reason="no partner") for node in nodes))
    run.finish("proceed", reason="undecided, continuing anyway")
    run.write(journal.SUPERVISOR, ScriptStarted(script="/home/ml/train.sh", pid=1))
    told = summary_of(load(tmp_path, "12"))

    assert len(told.found) == 1
    assert told.found[0].startswith(found)
    assert "connection closed by peer" in told.found[0]
    assert "NCCL_SOCKET_IFNAME" in told.next
    assert "firewalls" in told.next
    assert "scancel 12" in told.next
    assert option in told.next


def apart(root: Path, nodes: list[str], clock: Clock, label: str) -> None:
    """Write an attempt in which two nodes could not exchange data."""
    run = RunJournal(root, nodes=nodes, clock=clock, label=label)
    run.start()
    run.begin_round(0, [nodes])
    for node in nodes:
        run.write(node, NodeReported(node=node, round=0, outcome=Outcome.FAILED, elapsed_ms=9.0))
    run.end_round(0)
    doubt = Level.INCONCLUSIVE
    run.judge(*(NodeVerdict(node=node, level=doubt, reason="no partner") for node in nodes))
    run.finish("requeue", reason="no partner")


def test_of_two_nodes_that_could_not_exchange_data_a_later_check_tells_the_likelier_one(
    tmp_path: Path,
) -> None:
    clock = Clock()
    apart(tmp_path, ["n1", "n2"], clock, "0")
    well = RunJournal(tmp_path, nodes=["n1", "n3"], clock=clock, label="1")
    well.start()
    well.begin_round(0, [("n1", "n3")])
    well.measure(0, ("n1", "n3"))
    well.end_round(0)
    well.judge()
    well.finish("proceed")

    told = summary_of(load(tmp_path, "12"))

    said = "n2 cannot exchange data with n1, which can with other nodes: it is the likelier"
    assert told.found == (f"{said} of the two to be at fault, but that is not proven",)
    assert told.next.startswith("tell your administrators about n2 ")


def test_of_two_pairs_that_could_not_exchange_data_no_node_is_the_likelier_one(
    tmp_path: Path,
) -> None:
    clock = Clock()
    apart(tmp_path, ["n1", "n2"], clock, "0")
    apart(tmp_path, ["n1", "n3"], clock, "1")

    assert "likelier" not in " ".join(summary_of(load(tmp_path, "12")).found)
