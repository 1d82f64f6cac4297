# SPDX-License-Identifier: Apache-2.0
"""What a sweep's jobs have left, from real shells in real directories."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.index import Index
from slurm_health.fleet.partners import groups
from slurm_health.fleet.sweep import EndedJob, Sweep, SweepSettings, Turn, ended_text, script
from slurm_health.records.errors import JournalError
from tests.support.fake_slurm import FakeSlurm
from tests.support.rows import rows

NOW_S = 1_700_000_000.0


def swept(root: Path, environ: Mapping[str, str] | None = None, *sbatch: str) -> Sweep:
    settings = SweepSettings(
        partition="main", share=0.1, every_s=1.0, limit_min=15, check=["true"], sbatch=sbatch
    )
    return Sweep(settings, root, environ or {})


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return swept(tmp_path)


def turn_of(sweep: Sweep) -> Turn:
    with contextlib.closing(Index(None)) as index:
        return sweep.run(index, now_s=NOW_S)


def run(sweep: Sweep, job: int, *words: str, ended_by_slurm: str = "") -> None:
    """Let a job run whose check is this command."""
    with (sweep.directory / f"{job}.out").open("w") as output:
        if ended_by_slurm:
            output.write(f"slurmstepd: error: *** JOB {job} ON n1 CANCELLED {ended_by_slurm} ***\n")
        else:
            subprocess.run(
                ["/bin/sh", "-c", script(words)], stdout=output, stderr=output, check=False
            )


@rows
def test_a_job_tells_how_its_check_ended(sweep: Sweep, words: list[str], outcome: EndedJob) -> None:
    run(sweep, 7, *words)
    assert sweep.ended(sweep.begun()) == [outcome]
    assert sweep.ended(sweep.begun()) == []  # told once


def test_a_check_that_slurm_ended_has_given_way_or_run_out_of_time(sweep: Sweep) -> None:
    run(sweep, 1, ended_by_slurm="AT 2026-11-23T02:00:00 DUE TO PREEMPTION")
    run(sweep, 2, ended_by_slurm="AT 2026-11-23T02:00:00 DUE TO TIME LIMIT")
    found = sweep.ended(sweep.begun())
    assert found == [EndedJob(job=1), EndedJob(job=2, trouble="Slurm ended it: time limit")]
    lost = "AT 2026-11-23T02:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"
    run(sweep, 7, ended_by_slurm=lost)
    assert sweep.ended([7]) == [EndedJob(job=7, trouble="Slurm ended it: node failure")]
    assert ended_text(found) == (
        "of 2 jobs that have ended, 0 checked their nodes, 1 gave way, 1 checked nothing: Slurm"
        " ended it: time limit (job 2)"
    )


def test_a_job_that_waits_or_runs_is_left_alone(sweep: Sweep) -> None:
    run(sweep, 7, "true")
    assert sweep.ended([8]) == []
    assert len(sweep.ended([7])) == 1


def test_a_shell_that_is_ended_waits_for_its_check(sweep: Sweep) -> None:
    run(sweep, 7, "sh", "-c", "kill -TERM $PPID; sleep 0.1; exit 1")
    assert sweep.ended(sweep.begun()) == [EndedJob(job=7, checked=True)]


def partition(directory: Path, names: Sequence[str]) -> FakeSlurm:
    slurm = FakeSlurm(directory, names)
    slurm.set(partition_nodes=f"n[1-{len(names)}]")
    return slurm


@pytest.mark.parametrize(("codes", "exit_code"), [([], 0), ([0, 3], 0), ([0, 2], 3), ([1], 0)])
def test_a_person_has_to_look_if_a_job_failed(
    tmp_path: Path, codes: list[int], exit_code: int
) -> None:
    slurm = partition(tmp_path / "slurm", [f"n{number}" for number in range(1, 6)])
    sweep = swept(tmp_path, slurm.environ())
    for number, code in enumerate(codes):
        run(sweep, 4700 + number, "sh", "-c", f"exit {code}")

    turn = turn_of(sweep)

    assert turn.exit_code == exit_code, turn


def test_a_directory_that_is_anothers_is_not_used(tmp_path: Path) -> None:
    swept(tmp_path).directory.rmdir()
    swept_directory = tmp_path / f".sweep-{os.getuid()}"
    swept_directory.symlink_to("/tmp")

    with pytest.raises(JournalError, match="cannot be written"):
        swept(tmp_path)


@rows
def test_nodes_of_a_reservation_are_passed_over_unless_the_jobs_are_in_one(
    tmp_path: Path, options: list[str], chosen: str, idle: int
) -> None:
    slurm = partition(tmp_path / "slurm", [f"n{number}" for number in range(1, 10)])
    for name in ("n1", "n2", "n3"):
        slurm.change_node(name, state="IDLE+RESERVED")

    turn = turn_of(swept(tmp_path, slurm.environ(), *options))

    assert [line.split()[1] for line in turn.lines] == [chosen]
    assert f"of {idle} idle nodes are due" in turn.notes[-1]


@pytest.mark.parametrize("silent", ["IDLE*", "IDLE+NOT_RESPONDING"])
def test_nodes_that_do_not_answer_slurm_are_passed_over(tmp_path: Path, silent: str) -> None:
    slurm = partition(tmp_path / "slurm", [f"n{number}" for number in range(1, 6)])
    slurm.change_node("n1", state=silent)

    turn = turn_of(swept(tmp_path, slurm.environ()))

    assert [line.split()[1] for line in turn.lines] == ["n[2-4]"]


# --- whom a sweep checks together; tests/frozen has whom it chooses -------------------------------


NODES = [f"n{number:02}" for number in range(30)]


@given(
    st.dictionaries(st.sampled_from(NODES), st.floats(0, 200), max_size=30),
    st.integers(3, 8),
    st.integers(0, 40),
)
def test_every_group_is_of_different_idle_nodes_and_has_one_that_is_due(
    idle: dict[str, float], size: int, room: int
) -> None:
    due = {node for node, checked_s in idle.items() if checked_s < 100.0}
    found = groups(idle, {}, due=due, size=size, room=room)

    members = [node for group in found for node in group]
    assert len(set(members)) == len(members) <= room
    assert set(members) <= idle.keys()
    assert all(3 <= len(group) <= size for group in found)
    assert all(due & {*group} for group in found)
