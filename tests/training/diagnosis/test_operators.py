# SPDX-License-Identifier: Apache-2.0
"""From what ranks really wrote to the cause; and no node is accused but by Slurm or its driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.report.post_mortem import lines_of
from slurm_health.training.diagnosis.collected import (
    Collected,
    NodesTold,
    NodeTold,
    ScriptEnd,
    SlurmView,
)
from slurm_health.training.diagnosis.diagnostician import ActionKind, Diagnostician, observe_failure
from slurm_health.training.diagnosis.inference import InferenceChain
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.rank_failures import RankFailure
from slurm_health.training.diagnosis.training_log import TrainingLog, read_log

DATA = Path(__file__).parents[2] / "data" / "diagnosis"
END = ScriptEnd(exit_code=1, nodes=("n1", "n2", "n3"), script="train.sh")
TIMED_OUT = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"

KILLED_BY_KERNEL = ("Memory cgroup out of memory: Killed process 999 (julia) total-vm:8kB",)


def diagnose(*data: msgspec.Struct, end: ScriptEnd = END) -> Diagnosed:
    chain = InferenceChain(OPERATORS)
    action = Diagnostician(observe_failure, chain).diagnose(Collected([end, *data]))
    assert action.diagnosed is not None
    return action.diagnosed


def told(node: str, **told: Any) -> NodesTold:
    return NodesTold(nodes=(NodeTold(node=node, **told),))


def of_text(text: str) -> Diagnosed:
    return diagnose(read_log([("out", text)]))


def failed(rank: int, error: str = "", node: str = "", **rest: int | bool | str) -> RankFailure:
    return msgspec.convert(
        {
            "rank": rank,
            "error": error,
            "node": node,
            "at": rank,
            "line": f"{rank}: {error}",
            **rest,
        },
        RankFailure,
    )


@pytest.mark.parametrize(
    ("name", "cause", "attribution", "sureness", "ranks"),
    [
        ("wrong-shape", "wrong-shape", "user error", "likely", [1]),
        ("key-error", "same-error-everywhere", "user error", "certain", [0, 1]),
        ("nan", "not-a-number", "user error", "certain", [0, 1]),
        ("mismatch", "collectives-differ", "user error", "possible", [0, 1]),
        ("memory", "host-out-of-memory", "user error", "likely", [1]),
        ("disk-full", "disk-full", "undecided", "certain", [1]),
        ("checkpoint-disk-full", "disk-full", "undecided", "likely", [2]),
        ("kill", "killed", "undecided", "likely", [1]),
        ("segfault", "crashed", "undecided", "likely", [1]),
        ("exit", "rank-failed", "undecided", "likely", [1]),
    ],
)
def test_the_cause_is_found_in_what_ranks_really_wrote(
    name: str, cause: str, attribution: str, sureness: str, ranks: list[int]
) -> None:
    found = of_text((DATA / f"{name}.txt").read_text())

    assert (found.cause, found.attribution, found.sureness) == (cause, attribution, sureness)
    assert found.ranks == ranks
    assert found.accused == []


def test_the_first_failure_wins_over_the_connections_that_broke_after_it() -> None:
    found = of_text((DATA / "wrong-shape.txt").read_text())

    assert found.first == "rank 1 raised RuntimeError first; 1 other failed after it"


def test_the_place_is_the_users_line_where_the_first_of_a_chain_names_none() -> None:
    found = of_text((DATA / "checkpoint-disk-full.txt").read_text())

    assert found.evidence[0].endswith("iostream error (train.py:101)")


def test_a_script_that_ended_well_needs_no_diagnosis() -> None:
    action = Diagnostician(observe_failure, InferenceChain(OPERATORS)).diagnose(
        Collected([ScriptEnd(exit_code=0)])
    )

    assert action.kind is ActionKind.NOTHING


def test_without_any_data_the_end_of_the_script_is_all_that_is_said() -> None:
    found = diagnose()

    assert (found.cause, found.attribution) == ("script-failed", "undecided")
    assert "nothing that was collected says why" in found.description


def test_a_broken_gpu_on_a_node_that_the_job_asks_for_by_name_is_to_leave_its_nodelist() -> None:
    view = SlurmView(required=("n2",))
    log = TrainingLog(failures=(failed(1, "RuntimeError: CUDA error: GPU is lost", "n2"),))
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    by_output = diagnose(view, log)
    by_driver = diagnose(view, told("n2", kernel=(xid,)))

    assert by_output.nodes == by_driver.nodes == ["n2"]
    for found in (by_output, by_driver):
        assert "leave out n2 (sbatch --nodelist without n2)" in found.advice


def test_a_broken_gpu_that_the_driver_reports_is_the_cause_of_what_its_rank_met() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    log = TrainingLog(failures=(failed(2, "RuntimeError: CUDA error: unspecified launch failure"),))
    found = diagnose(told("n1", kernel=(xid,)), log)

    assert (found.cause, found.attribution, found.sureness) == (
        "gpu-broken",
        "node fault",
        "certain",
    )
    assert found.accused == ["n1"]


def test_an_xid_on_one_of_the_nodes_is_the_cause_of_a_failure_that_all_ranks_met() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    log = TrainingLog(
        failures=tuple(failed(n, TIMED_OUT, f"n{n + 1}", consequence=True) for n in range(3))
    )
    nodes = NodesTold(
        nodes=(NodeTold(node="n1"), NodeTold(node="n3", kernel=(xid,))), silent=("n2",)
    )
    found = diagnose(nodes, log)

    assert (found.cause, found.accused, found.ranks) == ("gpu-broken", ["n3"], [2])
    assert found.told == ["n2 did not answer: no answer in time", f"n3: kernel: {xid}"]


def test_a_gpu_that_only_nvml_calls_lost_is_a_likely_fault_of_its_node() -> None:
    found = diagnose(told("n2", lost_gpus=("GPU 1 (0000:3b:00.0) is lost: GPU is lost",)))

    assert (found.cause, found.sureness, found.accused) == ("gpu-broken", "likely", ["n2"])


def test_a_node_that_does_not_answer_is_named_and_not_accused() -> None:
    found = diagnose(NodesTold(nodes=(NodeTold(node="n1"),), silent=("n2", "n3"), why_silent="why"))

    assert found.told == ["n[2-3] did not answer: why"]
    assert (found.nodes, found.accused) == ([], [])


def test_what_every_node_tells_of_its_state_is_left_out_and_what_some_tell_is_told_once() -> None:
    state = [("usb0 has no link", full) for full in ("/tmp is full", "/tmp is full", "ib0 is down")]
    nodes = [NodeTold(node=f"n{n}", state=each) for n, each in enumerate(state, 1)]
    found = diagnose(NodesTold(nodes=tuple(nodes)))

    assert found.told == ["n[1-2]: /tmp is full", "n3: ib0 is down"]


def test_what_could_not_be_looked_at_on_nodes_is_among_what_was_not_collected() -> None:
    missing = {"kernel log": "/dev/kmsg: Operation not permitted"}
    nodes = tuple(NodeTold(node=node, not_seen=missing) for node in ("n1", "n2"))
    found = diagnose(NodesTold(nodes=nodes))

    assert found.not_collected == ["kernel log: /dev/kmsg: Operation not permitted (n[1-2])"]


def test_an_xid_that_a_program_causes_accuses_nobody() -> None:
    xid = "NVRM: Xid (PCI:0000:3b:00): 31, pid=12, MMU Fault"
    found = diagnose(told("n1", kernel=(xid,)))

    assert found.accused == []


@pytest.mark.parametrize(
    "data",
    [
        told("n1", kills=1, limit_bytes=2_000_000_000),
        TrainingLog(notes=("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.",)),
        TrainingLog(notes=("srun: error: n3: task 2: Out Of Memory",)),
        told("n1", kernel=KILLED_BY_KERNEL, not_seen={"memory kills": "no memory cgroup"}),
    ],
    ids=["cgroup", "slurmstepd", "srun", "kernel"],
)
def test_a_kill_for_memory_explains_a_rank_that_was_killed(data: msgspec.Struct) -> None:
    log = TrainingLog(failures=(failed(2, signal=9),), notes=getattr(data, "notes", ()))
    found = diagnose(*({type(each): each for each in (data, log)}.values()))

    assert (found.cause, found.attribution) == ("killed-for-memory", "user error")
    assert found.accused == []


def test_a_kill_of_another_job_of_the_node_is_not_this_jobs_whose_count_says_none() -> None:
    log = TrainingLog(failures=(failed(0, "KeyError: 'lr'"),))
    found = diagnose(told("n1", kills=0, kernel=KILLED_BY_KERNEL), log)

    assert found.cause == "program-error"
    assert found.told == [f"n1: kernel: {KILLED_BY_KERNEL[0]}"]


def test_a_script_that_prints_the_counters_of_its_cgroup_was_not_killed_for_memory() -> None:
    counters = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"
    flags = "slurm_flags: --oom-kill-step=0\nOut Of Memory guard: off\n"
    found = of_text(counters + flags + (DATA / "key-error.txt").read_text())

    assert found.cause == "same-error-everywhere"


def test_a_file_that_a_user_called_nan_misses_is_not_there_and_no_device_is_doubted() -> None:
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/home/nan/train.bin'"
    found = diagnose(TrainingLog(failures=(failed(1, error, "n2"),)))

    assert found.cause == "file-not-found"
    assert "device" not in found.description


def test_a_line_number_of_802_accuses_no_node_of_its_fabric() -> None:
    error = "RuntimeError: CUDA error: invalid argument at kernel.cu:802"

    assert diagnose(TrainingLog(failures=(failed(1, error, "n2"),))).accused == []


def test_what_to_do_after_a_kill_goes_by_what_is_there_to_ask() -> None:
    log = TrainingLog(failures=(failed(2, signal=9),))
    outside = msgspec.structs.replace(END, in_slurm=False)

    assert "sacct" in diagnose(log).advice
    advice = diagnose(log, end=outside).advice
    assert "sacct" not in advice
    assert "dmesg" in advice
    assert "memory.events" in advice


@pytest.mark.parametrize(
    "text",
    [
        "srun: error: n2: task 3: User defined signal 1",
        "  host      : n2\n  rank      : 3 (local_rank: 1)\n  exitcode  : -10 (pid: 123)",
    ],
    ids=["srun", "torchrun"],
)
def test_a_signal_that_was_sent_is_no_crash_of_native_code_or_of_a_node(text: str) -> None:
    found = of_text(text)

    assert found.cause == "killed"
    assert "rank 3 on n2 was ended by SIGUSR1, which was sent to it" in found.description
    assert "leave it out" not in found.advice


def test_a_rank_that_met_an_illegal_instruction_has_crashed() -> None:
    found = of_text("srun: error: n2: task 5: Illegal instruction (core dumped)")

    assert found.cause == "crashed"
    assert "SIGILL, an illegal instruction" in found.description


def test_a_count_of_no_kills_says_nothing() -> None:
    log = TrainingLog(failures=(failed(2, signal=9),))

    assert diagnose(told("n1", kills=0), log).cause == "killed"


@pytest.mark.parametrize(
    ("state", "words"), [("TIMEOUT", "time limit"), ("CANCELLED", "was cancelled")]
)
def test_a_job_that_slurm_ended_is_no_failure_of_a_rank(state: str, words: str) -> None:
    log = TrainingLog(failures=(failed(0, TIMED_OUT, consequence=True),))
    end = ScriptEnd(exit_code=143, signal=15, nodes=END.nodes)
    found = diagnose(SlurmView(job_states=("COMPLETING", state)), log, end=end)

    assert (found.cause, found.attribution) == ("ended-from-outside", "ended from outside")
    assert words in found.description


@pytest.mark.parametrize(
    ("due", "cause"),
    [
        ("", "ended-from-outside"),
        (" DUE TO TIME LIMIT", "ended-from-outside"),
        (" DUE TO PREEMPTION", "ended-from-outside"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node-lost"),
    ],
)
def test_slurms_line_in_the_output_says_that_a_job_was_ended_whatever_its_script_made_of_it(
    due: str, cause: str
) -> None:
    line = f"slurmstepd-n1: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-22T12:09:33{due} ***"
    found = of_text(f"{line}\nsrun: error: n1: task 0: Terminated\n")

    assert found.cause == cause


@pytest.mark.parametrize(("job", "cause"), [("2", "ended-from-outside"), ("3", "script-failed")])
def test_slurms_line_counts_where_it_is_of_this_job(job: str, cause: str) -> None:
    """A script may print the output of another that it has submitted."""
    line = "slurmstepd: error: *** JOB 2 ON n1 CANCELLED AT 2026-11-22T12:09:33 ***"
    log = read_log([("out", f"{line}\n")])

    assert diagnose(log, end=ScriptEnd(exit_code=1, nodes=("n1",), job=job)).cause == cause


def test_where_slurm_does_not_say_which_node_it_lost_none_is_accused() -> None:
    due = "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"
    found = of_text(f"slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-22 {due} ***\n")

    assert (found.cause, found.nodes, found.accused) == ("node-lost", [], [])
    assert "sinfo -R" in found.advice


@pytest.mark.parametrize(("node", "accused"), [("n1", ["n1"]), ("elsewhere", [])])
def test_slurms_word_of_broken_memory_names_the_node_if_the_job_ran_there(
    node: str, accused: list[str]
) -> None:
    line = f"*** JOB 2 ON {node} UNCORRECTABLE MEMORY ERROR AT 2026-11-22T12:09:33 ***"
    found = of_text(f"slurmstepd-{node}: error: {line}\n")

    assert found.accused == accused
    assert (found.cause == "memory-broken") is bool(accused)


def test_a_file_that_is_missing_on_the_ranks_of_one_node_is_not_decided() -> None:
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/data/train'"
    log = TrainingLog(failures=(failed(0, error, "n2"), failed(1, error, "n2")))
    found = diagnose(log)

    assert (found.cause, found.attribution) == ("same-error-everywhere", "undecided")
    assert found.nodes == ["n2"]
    assert found.accused == []


def test_what_a_program_says_of_its_gpu_accuses_its_node_only_where_the_kernel_agrees() -> None:
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    kernel = "NVRM: Xid (PCI:0000:3b:00): 95, pid=77, name=python, Uncontained ECC error"
    log = TrainingLog(failures=(failed(0, error, "n2"),))
    alone = diagnose(log)
    confirmed = diagnose(log, NodesTold(nodes=(NodeTold(node="n2", kernel=(kernel,)),)))
    everywhere = diagnose(TrainingLog(failures=(failed(0, error, "n2"), failed(1, error, "n3"))))

    assert (alone.cause, alone.nodes, alone.accused) == ("gpu-broken", ["n2"], [])
    assert confirmed.accused == ["n2"]
    assert everywhere.accused == []


def test_a_nan_on_one_rank_alone_leaves_room_for_a_device_that_computes_wrongly() -> None:
    found = diagnose(TrainingLog(failures=(failed(3, "AssertionError: loss is nan", "n2"),)))

    assert (found.attribution, found.sureness) == ("user error", "likely")
    assert "a device that computes wrongly is possible" in found.description
    assert found.accused == []


def test_an_exception_of_cpp_is_told_by_its_name_without_its_namespace() -> None:
    error = "c10::AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    found = diagnose(TrainingLog(failures=(failed(2, error, "n2"),)))

    assert found.first == "rank 2 on n2 raised AcceleratorError first"


def test_connections_that_broke_without_a_cause_are_transient_and_accuse_nobody() -> None:
    failures = tuple(failed(rank, TIMED_OUT, consequence=True) for rank in (0, 1))
    found = diagnose(TrainingLog(failures=failures))

    assert (found.cause, found.attribution) == ("connections-broke", "transient")
    assert found.sureness == "possible"
    assert found.accused == []


def test_what_was_not_looked_at_is_told_only_where_it_may_have_decided() -> None:
    missing = {"kernel-log": "/dev/kmsg: Permission denied"}
    chain = InferenceChain(OPERATORS)

    def titles(log: TrainingLog) -> set[str]:
        data = Collected([END, log], missing=missing)
        found = Diagnostician(observe_failure, chain).diagnose(data).diagnosed
        assert found is not None
        return {title for title, _ in lines_of(found)}

    assert "not seen" in titles(TrainingLog(failures=(failed(2, signal=9),)))
    assert "not seen" not in titles(TrainingLog(failures=(failed(2, "KeyError: 1"),)))
