# SPDX-License-Identifier: Apache-2.0
"""A training that hung until it failed: what the monitor saw explains what ranks do not."""

from __future__ import annotations

import pytest

from slurm_health.records.script_records import Diagnosed, EventKind, TrainingEvent
from slurm_health.training.diagnosis.collected import (
    MonitorReport,
    RankFailure,
    SlurmView,
    TrainingLog,
)
from tests.training.diagnosis.test_operators import diagnose

STUCK = Diagnosed(
    cause="data-loader-stuck",
    description="rank 1 on n2 waits for the data loader",
    attribution="undecided",
    sureness="likely",
    nodes=["n2"],
    ranks=[1],
    evidence=["rank 1 on n2 at train.py:39: waits for its data loader"],
    advice="look at what the data loader reads there",
)
SAW = MonitorReport(
    hang=TrainingEvent(
        event=EventKind.HANG,
        stalled_s=33.0,
        usual_s=25.0,
        step=45,
        nodes=STUCK.nodes,
        ranks=STUCK.ranks,
        diagnosed=STUCK,
    )
)
TIMED_OUT = RankFailure(
    rank=0,
    error="RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    line="rank 0: RuntimeError: Timed out waiting",
    consequence=True,
)


def test_a_job_that_was_cancelled_while_it_hung_is_told_where_it_hung() -> None:
    found = diagnose(SlurmView(job_states=("CANCELLED",)), SAW)

    assert (found.cause, found.attribution) == ("ended-from-outside", "ended from outside")
    assert found.description == "the job was cancelled while the training hung"
    assert "rank 1 on n2 waits for the data loader" in found.evidence
    assert found.advice == f"should it hang again: {STUCK.advice}"


@pytest.mark.parametrize(
    ("state", "cancels", "until"),
    [
        ("CANCELLED", True, "slurm-health cancelled the job (--monitor=stop)"),
        ("TIMEOUT", False, "the job reached its time limit"),
    ],
)
def test_a_hang_that_the_monitor_or_the_time_limit_ended_is_told_as_a_hang(
    state: str, cancels: bool, until: str
) -> None:
    saw = MonitorReport(hang=SAW.hang, cancels=cancels)
    found = diagnose(SlurmView(job_states=(state,)), saw)

    assert found.description == f"the training hung until {until}: {STUCK.description}"
    assert found.attribution == STUCK.attribution
    assert "more time" not in found.advice


SLOW = Diagnosed(
    cause="slow-data-loader",
    description="rank 1 on n2 is slow because it waits for its data loader",
    attribution="undecided",
    sureness="likely",
    nodes=["n2"],
    ranks=[1],
)
BEFORE = "monitor, before that: rank 1 on n2 is slow because it waits for its data loader"


def test_a_failure_or_hang_on_a_node_that_was_slow_before_says_so() -> None:
    killed = RankFailure(rank=1, signal=9, node="n2", line="srun: error: n2: task 1: Killed")
    elsewhere = RankFailure(rank=2, signal=9, node="n3", line="srun: error: n3: task 2: Killed")
    saw = MonitorReport(slow=(SLOW,))

    assert diagnose(TrainingLog(failures=(killed,)), saw).evidence[-1] == BEFORE
    assert BEFORE not in diagnose(TrainingLog(failures=(elsewhere,)), saw).evidence
    hung = diagnose(TrainingLog(failures=(TIMED_OUT,)), MonitorReport(hang=SAW.hang, slow=(SLOW,)))
    assert hung.evidence[-1] == BEFORE
