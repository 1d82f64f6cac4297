# SPDX-License-Identifier: Apache-2.0
"""What is said of trainings that failed over NCCL on played GPUs, by their recordings."""

from __future__ import annotations

import re

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import ScriptEnd, TrainingLog
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.framework import DataManager
from tests.support.played_recordings import (
    DATA,
    RECORDED,
    gpu_findings,
    monitor,
    post_mortem,
    recording,
)

# Whom both blame, what the post-mortem names, what the monitor names; empty where nothing hung.
EXPECTED = {
    "behind": ("user error", "mismatched-collective", "rank-out-of-step"),
    "dead-link": ("undecided", "collective-timed-out", "network-of-group"),
    "device-memory": ("user error", "gpu-out-of-memory", ""),
    "disk": ("undecided", "disk-full", ""),
    "ecc": ("node fault", "gpu-broken", ""),
    "fsdp-loader": ("undecided", "never-entered", "data-loader-stuck"),
    "fsdp-stopped": ("undecided", "never-entered", "rank-stopped"),
    "gone": ("undecided", "rank-failed", ""),
    "kernel-hangs": ("undecided", "never-entered", "rank-elsewhere"),
    "killed": ("undecided", "killed", ""),
    "launch-failure": ("undecided", "launch-failure", ""),
    "left-out": ("user error", "rank-out-of-step", "rank-out-of-step"),
    "link-breaks": ("transient", "connections-broke", "no rank was seen"),
    "loader": ("undecided", "never-entered", "data-loader-stuck"),
    "loader-clip": ("undecided", "never-entered", "data-loader-stuck"),
    "loader-silent": ("undecided", "never-entered", "data-loader-stuck"),
    "loader-synchronize": ("undecided", "never-entered", "data-loader-stuck"),
    "memory": ("user error", "host-out-of-memory", ""),
    "mismatch": ("user error", "mismatched-collective", "mismatched-collective"),
    "mismatched-size": ("user error", "mismatched-collective", "mismatched-collective"),
    "mount": ("undecided", "never-entered", "data-loader-stuck"),
    "nan": ("user error", "not-a-number", ""),
    "nccl-error": ("transient", "connections-broke", "no rank was seen"),
    "off-bus": ("node fault", "gpu-broken", ""),
    "own-code": ("undecided", "never-entered", "rank-elsewhere"),
    "segfault": ("undecided", "crashed", ""),
    "shape": ("user error", "wrong-shape", ""),
    "stage-loader": ("undecided", "never-entered", "data-loader-stuck"),
    "stage-own-code": ("undecided", "never-entered", "rank-elsewhere"),
    "stage-stopped": ("undecided", "never-entered", "rank-stopped"),
    "stopped": ("undecided", "never-entered", "rank-stopped"),
}
# Rank 2, which runs on n2, unless listed here.
RANKS = {"nan": [0, 1, 2, 3], "stage-loader": [1]}
NODES_OF_RANKS = {"nan": ["n1", "n2"], "stage-loader": ["n1"]}
CONNECTIONS = {"dead-link", "link-breaks", "nccl-error"}  # whose they were is not known
BROKEN_GPU = {"ecc", "off-bus"}
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
def test_post_mortem_monitor_and_gpu_check_name_what_was_done_and_no_innocent_node(
    name: str,
) -> None:
    recorded = recording(name)
    blame, cause, hang = EXPECTED[name]
    ranks, nodes = RANKS.get(name, [2]), NODES_OF_RANKS.get(name, ["n2"])

    failure = post_mortem(recorded)
    assert failure is not None
    assert (failure.cause, failure.attribution, failure.ranks) == (cause, blame, ranks)
    assert failure.nodes == ([] if name in CONNECTIONS else nodes)
    assert failure.accused == (["n2"] if name in BROKEN_GPU else [])

    told = monitor(recorded)
    if isinstance(told, Diagnosed):
        assert (told.cause, told.attribution, told.accused) == (hang, blame, [])
        if name == "dead-link":  # all have entered and none leaves: the network, and no rank
            ranks, nodes = [0, 1, 2, 3], ["n1", "n2"]
        assert (told.ranks, told.nodes) == (ranks, nodes)
    else:
        assert (told or "") == hang

    assert set(gpu_findings(recorded)) == ({"n2"} if name in BROKEN_GPU else set())


@pytest.mark.parametrize("name", ["ecc", "off-bus"])
def test_the_check_of_gpus_names_the_gpu_that_broke_under_the_training(name: str) -> None:
    assert gpu_findings(recording(name))["n2"].startswith("GPU 0 ")


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
    aborted = [failure for failure in log.failures if failure.rank in {0, 1, 3}]
    assert {failure.rank for failure in aborted} == {0, 1, 3}
    assert all(
        "Watchdog caught collective operation timeout" in failure.error for failure in aborted
    )
    assert {(failure.rank, failure.node) for failure in aborted} == {
        (0, "n1"),
        (1, "n1"),
        (3, "n2"),
    }


@pytest.mark.parametrize(
    ("printed", "instead"),
    [
        (r"\[E\d{4} ", "[E626 "),  # in June: months have no leading zero
        (r"\[E\d{4} [\d:.]+ ", "[E "),  # as torch 2.2 prints it
        (r"(?m)^", "[80746] "),  # numbered by what shows them
    ],
)
def test_an_abort_by_nccls_watchdog_is_no_crash_in_any_month_and_form(
    printed: str, instead: str
) -> None:
    text = re.sub(printed, instead, unlabelled(recording("stopped").output))
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
    text = recording("stopped").output
    (killed,) = [failure for failure in log_of(text).failures if failure.rank == 2]
    assert killed.consequence

    alone = "srun: error: n2: task 2: Killed\nsrun: Terminating StepId=1.0\n"
    assert not log_of(alone).failures[0].consequence


def test_an_exception_of_a_rank_is_its_failure_whatever_its_watchdog_says_later() -> None:
    raised = "[rank0]: Traceback (most recent call last):\n[rank0]: ValueError: batch 7 is empty\n"
    (own,) = log_of(raised + recording("stopped").output).of_their_own

    assert own.error == "ValueError: batch 7 is empty"


def test_a_gpu_whose_collective_waits_is_busy_at_little_power_and_that_of_the_stopped_is_idle() -> (
    None
):
    nodes = recording("stopped").gpus
    powers = {(now.node, gpu.index): gpu.power_w for now in nodes for gpu in now.samples}
    shares = [use.share for now in nodes for use in now.activity.by_pid.values()]

    assert powers == {("n1", 0): 130, ("n1", 1): 130, ("n2", 0): 75, ("n2", 1): 130}
    assert sorted(shares) == [0, 1, 1, 1]


@pytest.mark.parametrize("name", RECORDED)
def test_without_dumps_the_watchdogs_own_lines_name_the_rank_behind_and_no_other(name: str) -> None:
    diagnosis = diagnosed(1, recording(name).output)

    assert (diagnosis.cause == "never-entered") == (name in HELD_UP)
    if name in HELD_UP:
        assert (diagnosis.ranks, diagnosis.accused) == ([2], [])
        assert diagnosis.evidence[0].startswith("NCCL's watchdog of rank 2: last enqueued ")


def test_in_a_job_of_several_groups_the_watchdogs_lines_name_no_rank() -> None:
    text = recording("loader").output
    other = "[rank1]:[E1123 08:38:30.1 ProcessGroupNCCL.cpp:2372] [PG ID 1 PG GUID 2(data) Rank 0]"
    other += (
        "  failure detected by watchdog at work sequence id: 8 PG status: last enqueued work: 8,"
    )
    other += " last started work: -1 (), last completed work: 7\n"

    assert len(log_of(text).progress) == 4
    assert log_of(text + other).progress == ()
