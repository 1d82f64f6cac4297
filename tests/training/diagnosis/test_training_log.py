# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.script_records import Attribution
from slurm_health.training.diagnosis.collected import TrainingLog
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.diagnosis.words import known
from tests.support.ended_jobs import diagnosed_by_output

DATA = Path(__file__).parents[2] / "data"
TRACEBACK = """\
Traceback (most recent call last):
  File "/home/alice/train.py", line 7, in main
    step(batch)
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line 9, in step
    raise ValueError(text)
ValueError: batch 7 is empty
"""


def read(text: str, began: str = "") -> TrainingLog:
    return read_output([("out", text)], began=began)


def labelled(prefix: str, text: str = TRACEBACK) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "prefix",
    [
        *("[rank3]: ", "3: ", "[default0]:[rank3]: ", "3: [rank3]: ", " 3: [rank3]: "),
        "[gpu-n5.cluster:0]:[rank3]: ",
    ],
)
def test_a_rank_is_known_by_the_prefix_of_its_lines(prefix: str) -> None:
    (failure,) = read("step 1\n" + labelled(prefix)).failures

    assert failure.rank == 3
    assert failure.error == "ValueError: batch 7 is empty"
    assert failure.place == "train.py:7"
    assert not failure.consequence


def test_a_torchrun_that_was_killed_with_all_of_its_ranks_is_no_rank() -> None:
    text = (DATA / "diagnosis" / "key-error.txt").read_text()
    failures = read(text + "srun: error: n3: task 2: Killed\n").failures

    assert [(each.rank, each.node) for each in failures if each.signal] == [(None, "n3")]


def test_what_an_earlier_attempt_of_the_job_wrote_does_not_count() -> None:
    cancelled = (
        "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO JOB"
        " REQUEUE ***\n"
    )
    text = labelled("[rank0]: ") + cancelled + labelled("[rank1]: ")

    assert [each.rank for each in read(text, began="2026-11-22T10:00:05").failures] == [1]
    assert [each.rank for each in read(text, began="2026-11-22T09:59:00").failures] == [0, 1]


_DESYNC = """\
[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6, OpType=ALLREDUCE,\
 NumelIn=4, NumelOut=4, Timeout(ms)=8000) ran for 8097 milliseconds before timing out.
 - [0] Timeout at collective: ALLREDUCE, #7
 - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
   - [0, 3] joined but didn't finish collective #7 (count from 1)
     [1, 2] finished collective #6, but didn't join collective #7 (count from 1)
"""


def test_a_watchdogs_report_tells_how_far_ranks_came_that_wrote_nothing() -> None:
    log = read(_DESYNC)

    assert [failure.consequence for failure in log.failures] == [True]
    assert log.watchdogs
    reached = {each.rank: each.reached["0"] for each in log.progress}
    assert {rank: each.entered for rank, each in reached.items()} == {0: 7, 1: 6, 2: 6, 3: 7}
    difference = CollectiveState(log.progress).difference
    assert difference is not None
    assert difference.ranks == (1, 2)


def test_a_report_of_a_group_within_the_training_numbers_other_ranks_and_accuses_none() -> None:
    of_a_group = _DESYNC.replace("[Rank 0]", "[Rank 0] [PG ID 2 PG GUID 3(tensor) Rank 0]", 1)

    assert read(of_a_group).progress == ()


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks",
        "slurmstepd: error: Detected 2 oom-kill event(s) in step 12.batch cgroup. Some of your",
        "[2026-11-22T10:00:00.123] error: Detected 1 oom_kill event in StepId=12.batch.",
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "srun: error: n3: task 2: Out Of Memory",
        "srun: error: n[3-4]: tasks 2-3,7: Out Of Memory",
        "Memory cgroup out of memory: Killed process 999 (python) total-vm:8kB",
        "Memory cgroup out of memory: Kill process 999 (python) score 1 or sacrifice child",
        "Out of memory (oom_kill_allocating_task): Killed process 999 (python)",
        "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0",
    ],
)
def test_whole_phrases_of_slurm_and_the_kernel_tell_of_a_kill_for_memory(line: str) -> None:
    assert [fact.text for fact in read(line).facts] == [line]


@pytest.mark.parametrize(
    "line",
    [
        "oom_kill 0",
        "oom_kill 3",  # of whose cgroup, and since when, is not told
        "slurmstepd: Detected 0 oom_kill events",
        "guard against Out Of Memory: on",
        "srun --oom-kill-step=1 python train.py",
    ],
)
def test_words_about_memory_that_nobody_was_killed_for_are_no_note(line: str) -> None:
    assert read(line).facts == ()


UNDECIDED = Attribution.UNDECIDED
KNOWN = [
    ("OutOfMemoryError: CUDA out of memory. Tried to", "gpu-out-of-memory", Attribution.USER),
    # No size: CUDA itself found none, which another program or a broken GPU may explain.
    ("RuntimeError: CUDA error: out of memory", "gpu-out-of-memory", UNDECIDED),
    (
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != half",
        "wrong-type",
        Attribution.USER,
    ),
    ("RuntimeError: mat1 and mat2 must have the same dtype", "wrong-type", Attribution.USER),
    ("RuntimeError: mat1 and mat2 shapes cannot be", "wrong-shape", Attribution.USER),
    ("RuntimeError: Found no NVIDIA driver on your system", "no-gpu", UNDECIDED),
    *(
        (f"RuntimeError: {words}", "driver-mismatch", UNDECIDED)
        for words in (
            "The NVIDIA driver on your system is too old (found version 11040)",
            "CUDA error: CUDA driver version is insufficient for CUDA runtime",
            "Error 804: forward compatibility was attempted on non supported HW",
        )
    ),
    *(
        (error, "not-a-number", None)
        for error in (
            "AssertionError: loss is nan.",
            "AssertionError: loss is -inf",
            "ValueError: found NaN/Inf in gradients",
            "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
            "ValueError: loss=nan, stopping",
            "ValueError: a NaN-valued loss",
            "RuntimeError: the total norm of gradients is non-finite",
            "FloatingPointError: loss is tensor([nan, 1.0]) in /home/nan/train.py",
        )
    ),
    ("RuntimeError: CUDA error 802", "gpu-fabric", None),
    ("RuntimeError: CUDA error at b.cu:256 code=802(cudaErrorSystemNotReady)", "gpu-fabric", None),
    (
        "ValueError: Expected input batch_size (4) to match target batch_size (8).",
        "wrong-shape",
        None,
    ),
    ("OSError: [Errno 28] No space left on device: '/home/nan/a.pt'", "disk-full", None),
    ("OSError: [Errno 5] Input/output error: '/data/inf/0.bin'", "filesystem-failed", None),
    ("OSError: [Errno 30] Read-only file system: '/ckpt/0.pt'", "filesystem-failed", None),
    ("TimeoutError: [Errno 110] Connection timed out: '/ckpt/0.pt'", "filesystem-failed", None),
    ("OSError: [Errno 122] Disk quota exceeded: '/ckpt/0.pt'", "disk-full", None),
]


@pytest.mark.parametrize(("error", "name", "attribution"), KNOWN)
def test_an_exception_is_known_by_its_words_whatever_stands_around_them(
    error: str, name: str, attribution: Attribution | None
) -> None:
    found = known(error)
    assert found is not None
    assert (found.name, attribution or found.blame) == (name, found.blame)


@pytest.mark.parametrize(
    "error",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/home/nan/data/train.bin'",
        "FileNotFoundError: [Errno 2] No such file or directory: 'nan'",
        "RuntimeError: cannot read /data/inf/train.bin",
        "RuntimeError: cannot read data/nan.bin",
        "ValueError: cannot reach nan-1:29500",
        "ValueError: cannot reach nan:29500",
        "ValueError: cannot reach inf.example.org",
        "ModuleNotFoundError: No module named 'inf'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/OutOfMemoryError/log'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/bad_alloc.py'",
        "FileNotFoundError: Expected a file with the size of each sample",
        "ValueError: Expected a checkpoint in /home/alice/resized",
        "RuntimeError: CUDA error: invalid argument at kernel.cu:802",
        "RuntimeError: CUDA error: invalid argument (pid 18021)",
        "ValueError: network resnet50 not found",
    ],
)
def test_words_of_a_cause_in_the_name_of_something_else_tell_of_none(error: str) -> None:
    assert known(error) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            TRACEBACK
            + "\nDuring handling of the above exception, another exception occurred:\n\n"
            + TRACEBACK.replace("ValueError: batch 7 is empty", "RuntimeError: worker died"),
            "ValueError: batch 7 is empty",
        ),
        (
            TRACEBACK.replace(
                "ValueError: batch 7 is empty",
                "RuntimeError: Caught ValueError in DataLoader worker process 0.\nOriginal"
                ' Traceback (most recent call last):\n  File "/home/a/data.py", line 3, in get\n'
                "    x[1]\nValueError: no such sample",
            ),
            "ValueError: no such sample",
        ),
        (
            "torchtorch.DistBackendError.: NCCL error\nncclInvalidUsage: invalid usage of NCCL.\n",
            "ncclInvalidUsage: invalid usage of NCCL.",
        ),
        (
            f"{'x' * 5_000_000}\n{''.join(f'{chr(13)}{n} %' for n in range(100))}\r{TRACEBACK}",
            "ValueError: batch 7 is empty",
        ),
    ],
    ids=["chained", "of a data loader", "of lines that mixed", "behind megabytes"],
)
def test_the_exception_that_explains_a_failure_is_the_first(text: str, error: str) -> None:
    (failure,) = read(text).failures
    assert failure.error == error


@pytest.mark.heavy
def test_a_cause_before_a_million_lines_is_found() -> None:
    error = labelled("[rank1]: ", 'Traceback (most recent call last):\n  File "/home/a/t.py"\n')
    error += "[rank1]: ModuleNotFoundError: No module named 'einops'\n"
    text = error + "step 4711 loss 2.25\n" * 1_000_000 + "Terminated\n"
    assert diagnosed_by_output(text, 1, ("n1", "n2")).cause == "module-not-found"
