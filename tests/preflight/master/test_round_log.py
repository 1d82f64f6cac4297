# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from slurm_health.preflight.master.round_log import took_text
from slurm_health.records.records import NodeReported
from slurm_health.records.verdict import Outcome


def reports(**took_s: float) -> dict[str, NodeReported]:
    return {
        node: NodeReported(round=1, node=node, outcome=Outcome.MEASURED, elapsed_ms=1000 * seconds)
        for node, seconds in took_s.items()
    }


def test_each_of_few_nodes_is_told_with_its_seconds() -> None:
    assert took_text(reports(n2=2.21, n1=1.0), ["n3"]) == "n1 1.0 s, n2 2.2 s; no answer from n3"


def test_of_many_nodes_the_slowest_are_told_and_what_is_usual() -> None:
    many = reports(**{f"n{number}": 1.0 + number for number in range(1, 10)})

    assert took_text(many, []) == "n9 10.0 s, n8 9.0 s, n7 8.0 s; median of 9 nodes 6.0 s"


def test_a_report_that_came_after_the_end_of_its_round_does_not_count() -> None:
    assert took_text(reports(n1=9.0), ["n1"]) == "no answer from n1"
