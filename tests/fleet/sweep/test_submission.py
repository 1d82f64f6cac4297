# SPDX-License-Identifier: Apache-2.0
"""What a sweep's jobs have left, from real shells in real directories."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from slurm_health.fleet.history.index import Index
from slurm_health.fleet.history.place import IndexPlace
from slurm_health.fleet.sweep.submission import (
    EndedSweepJob,
    Wishes,
    begun,
    checks_nothing,
    choose,
    directory,
    ended,
    prepare,
    script,
    told,
)
from slurm_health.system.slurm.client import Client
from tests.support.fake_slurm import FakeSlurm

UID = os.getuid()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert prepare(tmp_path, UID) == ""
    return tmp_path


def run(root: Path, job: int, *words: str, ended_by_slurm: str = "") -> None:
    """Let a job run whose check is this command."""
    with (directory(root, UID) / f"{job}.out").open("w") as output:
        if ended_by_slurm:
            output.write(f"slurmstepd: error: *** JOB {job} ON n1 CANCELLED {ended_by_slurm} ***\n")
        else:
            subprocess.run(
                ["/bin/sh", "-c", script(words)], stdout=output, stderr=output, check=False
            )


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (["true"], EndedSweepJob(job=7, checked=True)),
        (["sh", "-c", "exit 1"], EndedSweepJob(job=7, checked=True)),
        (["sh", "-c", "exit 3"], EndedSweepJob(job=7, checked=True, undecided=True)),
        (
            ["sh", "-c", "echo no torch; exit 2"],
            EndedSweepJob(job=7, trouble="its check ended with 2: no torch"),
        ),
        (
            ["sh", "-c", "exit 70"],
            EndedSweepJob(job=7, trouble="its check ended with 70: it says nothing"),
        ),
        (
            ["sh", "-c", "echo 'error: *** JOB 7 ON n1 CANCELLED AT x DUE TO PREEMPTION'; exit 4"],
            EndedSweepJob(job=7),
        ),
    ],
)
def test_a_job_tells_how_its_check_ended(
    root: Path, words: list[str], outcome: EndedSweepJob
) -> None:
    run(root, 7, *words)
    assert ended(root, UID, begun(root, UID)) == [outcome]
    assert ended(root, UID, begun(root, UID)) == []  # told once


def test_a_check_that_slurm_ended_has_given_way_or_run_out_of_time(root: Path) -> None:
    run(root, 1, ended_by_slurm="AT 2026-11-23T02:00:00 DUE TO PREEMPTION")
    run(root, 2, ended_by_slurm="AT 2026-11-23T02:00:00 DUE TO TIME LIMIT")
    found = ended(root, UID, begun(root, UID))
    assert found == [EndedSweepJob(job=1), EndedSweepJob(job=2, trouble="ran into its time limit")]
    assert told(found) == (
        "of 2 jobs that have ended, 0 checked their nodes, 1 gave way, 1 checked nothing: ran into"
        " its time limit (job 2)"
    )


def test_a_job_that_lost_a_node_has_not_given_way(root: Path) -> None:
    why = "AT 2026-11-23T02:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"
    run(root, 7, ended_by_slurm=why)
    found = ended(root, UID, begun(root, UID))
    assert found == [EndedSweepJob(job=7, trouble="Slurm lost one of its nodes")]
    assert checks_nothing(found)


def test_a_job_that_waits_or_runs_is_left_alone(root: Path) -> None:
    run(root, 7, "true")
    assert ended(root, UID, [8]) == []
    assert len(ended(root, UID, [7])) == 1


def test_a_shell_that_is_ended_waits_for_its_check(root: Path) -> None:
    run(root, 7, "sh", "-c", "kill -TERM $PPID; sleep 0.1; exit 1")
    assert ended(root, UID, begun(root, UID)) == [EndedSweepJob(job=7, checked=True)]


def test_somebody_has_to_look_where_a_job_failed_or_none_could_decide() -> None:
    fine, undecided = (
        EndedSweepJob(job=1, checked=True),
        EndedSweepJob(job=2, checked=True, undecided=True),
    )
    assert not checks_nothing([])
    assert not checks_nothing([fine, undecided])
    assert checks_nothing([undecided])
    assert checks_nothing([fine, EndedSweepJob(job=3, trouble="no torch")])


def test_a_directory_that_is_anothers_is_not_used(tmp_path: Path) -> None:
    planted = directory(tmp_path, UID)
    planted.symlink_to("/tmp")
    assert prepare(tmp_path, UID)
    assert ended(tmp_path, UID, begun(tmp_path, UID)) == []


@pytest.mark.parametrize(
    ("options", "chosen", "idle"),
    [
        ([], ("n04", "n05", "n06"), 6),
        (["--qos=scavenger"], ("n04", "n05", "n06"), 6),
        (["--reservation=repair"], ("n01", "n02", "n03"), 9),
        (["--reservation", "repair"], ("n01", "n02", "n03"), 9),
    ],
)
def test_nodes_of_a_reservation_are_passed_over_unless_the_jobs_are_in_one(
    tmp_path: Path, options: list[str], chosen: tuple[str, ...], idle: int
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", [f"n0{number}" for number in range(1, 10)])
    slurm.set(partition_nodes="n0[1-9]")
    for name in ("n01", "n02", "n03"):
        slurm.change_node(name, state="IDLE+RESERVED")
    wishes = Wishes(
        partition="main", share=0.1, size=4, every_s=1.0, limit_min=15, check=[], sbatch=options
    )

    client = Client(slurm.environ(), patience_s=0)
    with contextlib.closing(Index(IndexPlace(path=None))) as index:
        turn = choose(client, index, wishes, uid=UID, now_s=1_700_000_000.0)

    assert (turn.groups, turn.idle) == ([chosen], idle)


@pytest.mark.parametrize("silent", ["IDLE*", "IDLE+NOT_RESPONDING"])
def test_nodes_that_do_not_answer_slurm_are_passed_over(tmp_path: Path, silent: str) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", [f"n{number}" for number in range(1, 6)])
    slurm.set(partition_nodes="n[1-5]")
    slurm.change_node("n1", state=silent)
    wishes = Wishes(
        partition="main", share=0.1, size=4, every_s=1.0, limit_min=15, check=[], sbatch=[]
    )

    client = Client(slurm.environ(), patience_s=0)
    with contextlib.closing(Index(IndexPlace(path=None))) as index:
        turn = choose(client, index, wishes, uid=UID, now_s=1_700_000_000.0)

    assert (turn.groups, turn.idle) == ([("n2", "n3", "n4")], 4)
