# SPDX-License-Identifier: Apache-2.0
"""Which nodes a job has lost, by what Slurm says of them after a failure."""

from __future__ import annotations

import pytest

from slurm_health.training.diagnosis.collected import ScriptEnd, SlurmView
from slurm_health.training.diagnosis.training_log import TrainingLog
from tests.training.diagnosis.test_operators import END, TIMED_OUT, diagnose, failed


def test_a_node_that_is_down_is_lost_and_accused() -> None:
    view = SlurmView(node_states={"n1": "ALLOCATED", "n2": "DOWN*", "n3": "MIXED"})
    log = TrainingLog(failures=(failed(0, TIMED_OUT, consequence=True),))
    found = diagnose(view, log, end=ScriptEnd(exit_code=143, signal=15, nodes=END.nodes))

    assert (found.cause, found.attribution) == ("node-lost", "node fault")
    assert found.accused == ["n2"]


def test_a_lost_node_that_the_job_asks_for_by_name_is_to_leave_its_nodelist() -> None:
    """Sbatch refuses a node that is both asked for and excluded."""
    view = SlurmView(node_states={"n1": "DOWN", "n2": "DOWN*", "n3": "MIXED"}, required=("n2",))
    advice = diagnose(view).advice

    assert "(sbatch --nodelist without n2 and --exclude=n1)" in advice


def test_all_nodes_lost_at_once_are_not_accused() -> None:
    found = diagnose(SlurmView(node_states=dict.fromkeys(END.nodes, "DOWN*")))

    assert found.cause == "node-lost"
    assert found.accused == []


def test_a_node_that_only_does_not_answer_is_no_cause_where_a_rank_failed_by_itself() -> None:
    view = SlurmView(node_states={"n2": "ALLOCATED*"})
    log = TrainingLog(failures=(failed(0, "KeyError: 'lr'"),))
    found = diagnose(view, log)

    assert (found.cause, found.attribution) == ("program-error", "user error")
    assert found.accused == []


@pytest.mark.parametrize("state", ["ALLOCATED*", "ALLOCATED+NOT_RESPONDING"])
def test_a_node_that_does_not_answer_slurm_is_a_likely_cause_of_broken_connections(
    state: str,
) -> None:
    view = SlurmView(node_states={"n1": "ALLOCATED", "n2": state})
    log = TrainingLog(failures=(failed(0, "RuntimeError: Connection closed", consequence=True),))
    found = diagnose(view, log)

    assert (found.cause, found.sureness, found.accused) == ("node-lost", "likely", ["n2"])
    assert f"Slurm: n2 is {state}" in found.evidence


@pytest.mark.parametrize(
    "state",
    [
        "ALLOCATED+CLOUD+POWER_DOWN",  # set as soon as a PowerDownOnIdle partition gives it out
        "ALLOCATED+POWER_DRAIN",
        "ALLOCATED+FAIL",  # an administrator expects it to fail; the job goes on
        "FAILING",
        "IDLE+POWERED_DOWN",  # the job was off it
        "ALLOCATED+DRAIN",
    ],
)
def test_a_node_with_a_mark_for_later_is_not_lost_and_the_script_is_to_blame(state: str) -> None:
    view = SlurmView(node_states={"n1": state})
    log = TrainingLog(failures=(failed(0, "KeyError: 'lr'"),))
    found = diagnose(view, log, end=ScriptEnd(exit_code=137, nodes=("n1",)))

    assert (found.cause, found.attribution) == ("program-error", "user error")
    assert found.accused == []
