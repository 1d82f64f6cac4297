# SPDX-License-Identifier: Apache-2.0
"""When a check of this attempt stands for the one that a training asks for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.torchrun.earlier_check import EarlierCheck, find
from slurm_health.torchrun.place import TaskPlace

NODES = ("n1", "n2")
STARTED = RunStarted(
    run_id="abc",
    job_id=7,
    attempt=0,
    cluster="lab",
    partition="main",
    nodes=["n1", "n2", "n3"],
    master_node="n1",
    user="alice",
    start_time_s=100,
    settings={"check": "values,matmul,rail_allgather,allgather", "act": True},
)
VERDICT = VerdictReached(
    nodes=[
        NodeVerdict(node="n1", level=Level.HEALTHY),
        NodeVerdict(node="n2", level=Level.FAULTY, reason="dead"),
        NodeVerdict(node="n3", level=Level.HEALTHY),
    ]
)
GOES_ON = JobOutcome(disposition=Disposition.PROCEED, exit_code=1)
WHOLE = (STARTED, VERDICT, GOES_ON)
PROBES = ("matmul", "rail_allgather", "allgather")
BY_RUN = msgspec.structs.replace(STARTED, settings={**STARTED.settings, "nnodes": "2"})


def place(node: str = "n1", **differing: object) -> TaskPlace:
    known: dict[str, object] = {
        "nodes": NODES, "node": node, "start": "7.0.1", "job_id": 7, "step": 1,
        "cluster": "lab", "start_time_s": 100,
    }  # fmt: skip
    return TaskPlace(**{**known, **differing})  # type: ignore[arg-type]


def lay(root: Path, *records: Record, label: str = "0") -> Path:
    directory = journal.job_directory(root, "lab", 7) / label
    journal.create(directory, [journal.MASTER])
    journal.Writer(directory, journal.MASTER, lambda: 50.0).append(*records)
    return directory


def own(root: Path) -> Path:
    return journal.job_directory(root, "lab", 7) / "0-3"


def found(root: Path, here: TaskPlace | None = None) -> EarlierCheck | None:
    return find(own(root), here or place(), PROBES)


def test_the_check_before_the_script_stands_for_that_of_its_training(tmp_path: Path) -> None:
    directory = lay(tmp_path, *WHOLE)
    assert found(tmp_path) == EarlierCheck(directory=directory, verdict=VERDICT, ended_s=50.0)


def test_the_directory_that_another_task_has_made_for_this_start_is_none(tmp_path: Path) -> None:
    lay(tmp_path, *WHOLE)
    journal.create(own(tmp_path), ["n2"])
    assert found(tmp_path) is not None


@pytest.mark.parametrize(
    "records",
    [
        (),
        (STARTED,),
        (STARTED, VERDICT),
        (BY_RUN, VERDICT, GOES_ON),
        (STARTED, VERDICT, JobOutcome(disposition=Disposition.REQUEUE, exit_code=1)),
        (STARTED, VERDICT, JobOutcome(disposition=Disposition.PROCEED, exit_code=4)),
        (STARTED, VerdictReached(nodes=VERDICT.nodes[1:]), GOES_ON),
        (msgspec.structs.replace(STARTED, settings={"check": "matmul"}), VERDICT, GOES_ON),
        (msgspec.structs.replace(STARTED, start_time_s=99), VERDICT, GOES_ON),
    ],
    ids=[
        "nothing", "begun", "judged", "before a training", "requeued", "not checked",
        "other nodes", "less measured", "an older job's",
    ],
)  # fmt: skip
def test_any_other_check_stands_for_none(tmp_path: Path, records: tuple[Record, ...]) -> None:
    lay(tmp_path, *records)
    assert found(tmp_path) is None


def test_a_check_of_another_attempt_or_before_an_earlier_training_stands_for_none(
    tmp_path: Path,
) -> None:
    assert found(tmp_path) is None
    lay(tmp_path, *WHOLE)
    assert found(tmp_path, place(attempt=1)) is None
    assert found(tmp_path, place(chosen_start=True)) is None
    lay(tmp_path, BY_RUN, VERDICT, GOES_ON, label="0-2")
    assert found(tmp_path) is None
