# SPDX-License-Identifier: Apache-2.0
"""What the lines say that NCCL wrote in trainings that failed on played GPUs, by recordings.

What post-mortem, monitor and the check of GPUs conclude of each is in tests/frozen.
"""

import re
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager
from tests.support.rows import rows

DATA = Path(__file__).parent / "data" / "played_training"
RECORDED = sorted(directory.name for directory in DATA.iterdir() if directory.is_dir())
# Those in which all ranks use one group, and the one that holds up the others still writes.
HELD_UP = {
    "fsdp-loader",
    "kernel-hangs",
    "loader",
    "loader-clip",
    "loader-silent",
    "loader-synchronize",
    "mount",
    "own-code",
}


def output_of(name: str) -> str:
    """What ranks wrote and how they ended, as `srun --label` has it, without C++'s frames."""
    return (DATA / name / "output.txt").read_text()


def log_of(text: str) -> TrainingLog:
    return read_output([("out", text)])


def unlabelled(text: str) -> str:
    return re.sub(r"^\d+: ", "", text, flags=re.M)


def diagnosed(exit_code: int, text: str) -> Diagnosed:
    end = ScriptEnd(exit_code=exit_code, nodes=("n1", "n2"))
    diagnostician = FailureDiagnostician()
    diagnosis = diagnostician.diagnose(data_manager=DataManager([end, log_of(text)])).diagnosed
    assert diagnosis is not None
    return diagnosis


@pytest.mark.parametrize("name", RECORDED)
def test_no_recording_names_the_machine_that_it_was_made_on(name: str) -> None:
    for path in (DATA / name).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not re.search(rb"/tmp/|/root/", content), path
            assert bytes(DATA.parents[1]) not in content, path


@pytest.mark.parametrize("labelled", [True, False])
def test_an_abort_by_nccls_watchdog_is_no_crash_of_a_rank(labelled: bool) -> None:
    text = output_of("stopped")
    log = log_of(text if labelled else unlabelled(text))

    assert log.of_their_own == ()
    aborted = [failure for failure in log.failures if failure.rank in {0, 1, 3}]
    assert all(
        "Watchdog caught collective operation timeout" in failure.error for failure in aborted
    )
    places = {(failure.rank, failure.node) for failure in aborted}
    assert places == {(0, "n1"), (1, "n1"), (3, "n2")}


@rows
def test_an_abort_by_nccls_watchdog_is_no_crash_in_any_month_and_form(
    printed: str, instead: str
) -> None:
    text = re.sub(printed, instead, unlabelled(output_of("stopped")))
    diagnosis = diagnosed(134, text)

    assert diagnosis.cause != "crashed"
    assert diagnosis.accused == []


def test_a_watchdog_whose_rank_is_unknown_explains_no_other_abort() -> None:
    text = (
        "[E ProcessGroupNCCL.cpp:495] To avoid data inconsistency, we are taking the entire process"
        " down.\n"
    )
    crashed = "srun: error: n1: task 0: Aborted (core dumped)\n"

    (alone,) = log_of(text).failures
    assert (alone.rank, alone.consequence) == (None, True)
    (failure,) = log_of(text + crashed).failures
    assert (failure.rank, failure.signal, failure.consequence) == (0, 6, False)


def test_a_rank_that_srun_kills_after_the_others_did_not_fail_first() -> None:
    text = output_of("stopped")
    (killed,) = [failure for failure in log_of(text).failures if failure.rank == 2]
    assert killed.consequence

    alone = "srun: error: n2: task 2: Killed\nsrun: Terminating StepId=1.0\n"
    assert not log_of(alone).failures[0].consequence


def test_an_exception_of_a_rank_is_its_failure_whatever_its_watchdog_says_later() -> None:
    raised = "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: batch 7 is empty\n"
    (own,) = log_of(raised + output_of("stopped")).of_their_own

    assert own.error == "ValueError: batch 7 is empty"


@pytest.mark.parametrize("name", RECORDED)
def test_without_dumps_the_watchdogs_own_lines_name_the_rank_behind_and_no_other(name: str) -> None:
    diagnosis = diagnosed(1, output_of(name))

    assert (diagnosis.cause == "never-entered") == (name in HELD_UP)
    if name in HELD_UP:
        assert (diagnosis.ranks, diagnosis.accused) == ([2], [])
        assert diagnosis.evidence[0].startswith("NCCL's watchdog of rank 2: last enqueued ")


def test_in_a_job_of_several_groups_the_watchdogs_lines_name_no_rank() -> None:
    text = output_of("loader")
    other = "[rank1]:[E1123 08:38:30.1 ProcessGroupNCCL.cpp:2372] [PG ID 1 PG GUID 2(data) Rank 0]"
    other += (
        "  failure detected by watchdog at work sequence id: 8 PG status: last enqueued work: 8,"
    )
    other += " last started work: -1 (), last completed work: 7\n"

    assert len(log_of(text).progress) == 4
    assert log_of(text + other).progress == ()
