# SPDX-License-Identifier: Apache-2.0
"""What the log says of a check."""

import logging

import pytest

from slurm_health.preflight.master import check_log
from slurm_health.preflight.master.check_log import end_text
from slurm_health.records.records import (
    NodeReported,
    ProbeUsed,
    Rendezvous,
    RoundStarted,
)
from slurm_health.records.verdict import Outcome
from tests.support.rows import rows


@rows
def test_a_round_says_whether_nodes_are_measured_by_themselves_or_together(
    groups: list[list[str]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    meet = Rendezvous(address="n1", port=1)
    started = RoundStarted(
        round=4,
        name="round 3",
        groups=groups,
        rendezvous=[meet for _ in groups],
        deadline_s=1.0,
        probes=[ProbeUsed(name="values", scope="solo"), ProbeUsed(name="matmul", scope="solo")],
    )

    with caplog.at_level(logging.INFO, logger="slurm_health"):
        check_log.log_record(started)

    assert caplog.messages == [said]


def test_the_end_of_a_round_names_who_took_how_long_and_who_was_not_in_time() -> None:
    reports = {
        node: NodeReported(round=1, node=node, outcome=Outcome.MEASURED, elapsed_ms=elapsed_ms)
        for node, elapsed_ms in {"n2": 2210.0, "n1": 1000.0, "n3": 9000.0}.items()
    }
    assert end_text(reports, ["n3"]) == "elapsed n2 2.2 s, n1 1.0 s; no answer from n3"
