# SPDX-License-Identifier: Apache-2.0

import tomllib
from pathlib import Path

import pytest

from slurm_health.training.diagnosis.collected import TrainingLog
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.diagnosis.words import known
from tests.support.ended_jobs import diagnosed_by_output
from tests.support.rows import rows

DATA = Path(__file__).parents[2] / "data"
LINES = tomllib.loads((DATA / "lines.toml").read_text())
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


@rows
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


@pytest.mark.parametrize("line", LINES["killed_for_memory"])
def test_whole_phrases_of_slurm_and_the_kernel_tell_of_a_kill_for_memory(line: str) -> None:
    assert [fact.text for fact in read(line).facts] == [line]


@pytest.mark.parametrize("line", LINES["not_killed"])
def test_words_about_memory_that_nobody_was_killed_for_are_no_note(line: str) -> None:
    assert read(line).facts == ()


@pytest.mark.parametrize("row", LINES["known"], ids=str)
def test_an_exception_is_known_by_its_words_whatever_stands_around_them(row: list[str]) -> None:
    error, name, *blame = row
    found = known(error)
    assert found is not None
    assert (found.name, blame or [found.blame]) == (name, [found.blame])


@pytest.mark.parametrize("error", LINES["unknown"])
def test_words_of_a_cause_in_the_name_of_something_else_tell_of_none(error: str) -> None:
    assert known(error) is None


BEHIND_MEGABYTES = f"{'x' * 5_000_000}\n{''.join(f'{chr(13)}{n} %' for n in range(100))}\r"


@pytest.mark.parametrize(
    ("text", "error"),
    [*LINES["first"], (BEHIND_MEGABYTES + TRACEBACK, "ValueError: batch 7 is empty")],
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
