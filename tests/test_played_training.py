# SPDX-License-Identifier: Apache-2.0
"""What is said of trainings that failed over NCCL on played GPUs, by their recordings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.played_training.causes import BY_NAME
from benchmarks.played_training.perform import play
from benchmarks.played_training.recording import Recording, keep, read
from benchmarks.played_training.say import Verdict, health_check, monitor, post_mortem
from slurm_health.training.diagnosis.collected import Collected, ScriptEnd
from slurm_health.training.diagnosis.diagnostician import Diagnostician, observe_failure
from slurm_health.training.diagnosis.inference import InferenceChain
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.training_log import TrainingLog, read_log

DATA = Path(__file__).parent / "data" / "played_training"
RECORDED = sorted(each.name for each in DATA.iterdir() if each.is_dir())


def recording(name: str) -> Recording:
    return read(DATA / name)


def log_of(text: str) -> TrainingLog:
    return read_log([("out", text)])


def unlabelled(text: str) -> str:
    return re.sub(r"^\d+: ", "", text, flags=re.M)


def test_every_cause_that_is_played_has_its_recording() -> None:
    assert sorted(BY_NAME) == RECORDED


@pytest.mark.parametrize("name", RECORDED)
def test_no_recording_names_the_machine_that_it_was_made_on(name: str) -> None:
    for path in (DATA / name).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not re.search(rb"/tmp/|/root/", content), path
            assert bytes(DATA.parents[1]) not in content, path


@pytest.mark.parametrize("labelled", [True, False])
def test_an_abort_by_nccls_watchdog_is_no_crash_of_a_rank(labelled: bool) -> None:
    text = recording("stopped").output
    log = log_of(text if labelled else unlabelled(text))

    assert log.of_their_own == ()
    aborted = [each for each in log.failures if each.rank in {0, 1, 3}]
    assert {each.rank for each in aborted} == {0, 1, 3}
    assert all("Watchdog caught collective operation timeout" in each.error for each in aborted)
    assert {(each.rank, each.node) for each in aborted} == {(0, "n1"), (1, "n1"), (3, "n2")}


@pytest.mark.parametrize(
    ("told", "instead"),
    [
        (r"\[E\d{4} ", "[E626 "),  # in June: months have no leading zero
        (r"\[E\d{4} [\d:.]+ ", "[E "),  # as torch 2.2 says it
        (r"(?m)^", "[80746] "),  # numbered by what shows them
    ],
)
def test_an_abort_by_nccls_watchdog_is_no_crash_in_any_month_and_form(
    told: str, instead: str
) -> None:
    text = re.sub(told, instead, unlabelled(recording("stopped").output))
    end = ScriptEnd(exit_code=134, nodes=("n1", "n2"))
    diagnostician = Diagnostician(observe_failure, InferenceChain(OPERATORS))
    found = diagnostician.diagnose(Collected([end, log_of(text)])).diagnosed

    assert found is not None
    assert found.cause != "crashed"
    assert found.accused == []


def test_a_watchdog_whose_rank_is_not_told_explains_no_other_abort() -> None:
    text = (
        "[E ProcessGroupNCCL.cpp:495] To avoid data inconsistency, we are taking the entire process"
        " down.\n"
    )
    crashed = "srun: error: n1: task 0: Aborted (core dumped)\n"

    (alone,) = log_of(text).failures
    assert (alone.rank, alone.consequence) == (None, True)
    (failure,) = log_of(text + crashed).failures
    assert (failure.rank, failure.consequence) == (0, False)


def test_a_rank_that_srun_kills_after_the_others_did_not_fail_first() -> None:
    text = recording("stopped").output
    (killed,) = [each for each in log_of(text).failures if each.rank == 2]
    assert killed.consequence

    alone = "srun: error: n2: task 2: Killed\nsrun: Terminating StepId=1.0\n"
    assert not log_of(alone).failures[0].consequence


def test_an_abort_without_a_word_of_the_watchdog_is_a_crash() -> None:
    (failure,) = log_of("srun: error: n1: task 0: Aborted (core dumped)\n").failures

    assert failure.signal == 6
    assert not failure.consequence


def test_an_exception_of_a_rank_is_its_failure_whatever_its_watchdog_says_later() -> None:
    raised = "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: batch 7 is empty\n"
    (own,) = log_of(raised + recording("stopped").output).of_their_own

    assert own.error == "ValueError: batch 7 is empty"


def test_a_rank_that_left_no_dump_is_known_by_the_dumps_of_the_others() -> None:
    said = post_mortem(recording("stopped"))

    assert said.verdict is Verdict.RIGHT
    assert said.found is not None
    assert (said.found.cause, said.found.ranks, said.found.nodes) == ("never-entered", [2], ["n2"])


@pytest.mark.parametrize("name", ["ecc", "off-bus"])
def test_the_check_of_gpus_finds_the_one_that_broke_under_the_training(name: str) -> None:
    said = health_check(recording(name))

    assert said is not None
    assert "n2: GPU 0" in said.why
    assert "n1" not in said.why


def test_a_gpu_whose_collective_waits_is_busy_at_little_power_and_that_of_the_stopped_is_idle() -> (
    None
):
    told = recording("stopped").gpus
    powers = {(each.node, gpu.index): gpu.power_w for each in told for gpu in each.samples}
    shares = [use.share for each in told for use in each.activity.by_pid.values()]

    assert powers == {("n1", 0): 130, ("n1", 1): 130, ("n2", 0): 75, ("n2", 1): 130}
    assert sorted(shares) == [0, 1, 1, 1]


@pytest.mark.parametrize("name", RECORDED)
def test_nothing_wrong_is_said_of_a_recording(name: str) -> None:
    said = [judge(recording(name)) for judge in (post_mortem, monitor, health_check)]

    assert [each.why for each in said if each and each.verdict is Verdict.WRONG] == []


@pytest.mark.parametrize(
    "name", ["loader", "loader-silent", "loader-synchronize", "loader-clip", "kernel-hangs"]
)
def test_whoever_holds_up_gpus_that_wait_is_named_by_the_monitor(name: str) -> None:
    said = monitor(recording(name))

    assert said is not None
    assert said.found is not None, said.why
    assert (said.verdict, said.found.ranks, said.found.nodes) == (Verdict.RIGHT, [2], ["n2"])


def test_a_rank_in_its_data_loader_does_not_work_on_the_gpu_that_its_watchdog_opened() -> None:
    said = monitor(recording("stage-loader"))

    assert said is not None
    assert said.found is not None, said.why
    assert (said.found.cause, said.found.ranks) == ("data-loader-stuck", [1])


def test_all_have_entered_and_none_leaves_is_the_network_and_no_rank_elsewhere() -> None:
    said = monitor(recording("dead-link"))

    assert said is not None
    assert said.found is not None, said.why
    assert said.found.cause == "network-of-group"
    assert said.found.accused == []


@pytest.mark.played_gpu
@pytest.mark.timeout(600)
def test_a_cause_is_played_and_recorded_and_its_recording_says_the_same(
    played_python: Path, tmp_path: Path
) -> None:
    cause = BY_NAME["shape"]
    keep(play(cause, str(played_python)), cause, str(played_python), tmp_path / "shape")

    made = read(tmp_path / "shape")
    said = post_mortem(made)

    assert (said.verdict, said.why) == (Verdict.RIGHT, "")
    assert [each.node for each in made.gpus] == ["n1", "n2"]
    assert [len(each.samples) for each in made.gpus] == [2, 2]
    assert health_check(made) is None


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


@pytest.mark.parametrize("name", RECORDED)
def test_without_dumps_the_watchdogs_own_lines_name_the_rank_behind_and_no_other(name: str) -> None:
    end = ScriptEnd(exit_code=1, nodes=("n1", "n2"))
    data = Collected([end, log_of(recording(name).output)])
    found = Diagnostician(observe_failure, InferenceChain(OPERATORS)).diagnose(data).diagnosed

    assert found is not None
    assert (found.cause == "never-entered") == (name in HELD_UP)
    if name in HELD_UP:
        assert (found.ranks, found.accused) == ([2], [])
        assert found.evidence[0].startswith("NCCL's watchdog of rank 2: last enqueued ")


def test_in_a_job_of_several_groups_the_watchdogs_lines_name_no_rank() -> None:
    text = recording("loader").output
    other = "[rank1]:[E1123 08:38:30.1 ProcessGroupNCCL.cpp:2372] [PG ID 1 PG GUID 2(data) Rank 0]"
    other += (
        "  failure detected by watchdog at work sequence id: 8 PG status: last enqueued work: 8,"
    )
    other += " last started work: -1 (), last completed work: 7\n"

    assert len(log_of(text).progress) == 4
    assert log_of(text + other).progress == ()
