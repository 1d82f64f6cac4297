# SPDX-License-Identifier: Apache-2.0
"""The list of the caller's latest jobs: from their journals, and Slurm's word where it answers."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.report.export import LatestJob
from slurm_health.report.jobs import LatestJobs, latest_jobs, list_text
from slurm_health.report.layout import Page
from slurm_health.system import journal
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import (
    STARTED_S,
    RunJournal,
    write_healthy_run,
    write_requeued_job,
)
from tests.support.stranger import given_to

NO_SLURM: Mapping[str, str] = {"PATH": "/nonexistent"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm")


def asked_for(root: Path, environ: Mapping[str, str] = NO_SLURM, **asked: Any) -> LatestJobs:
    how = {"count": 10, "cluster": None, "name": "", **asked}
    return latest_jobs(root, how.pop("count"), now_s=2e9, environ=environ, **how)


def listed(root: Path, environ: Mapping[str, str] = NO_SLURM, **asked: Any) -> list[LatestJob]:
    return asked_for(root, environ, **asked).jobs


def checked(root: Path, *jobs: int, cluster: str = "lab") -> None:
    """Write a healthy check of each job, one a minute."""
    for minute, job in enumerate(jobs):
        directory = write_healthy_run(root, job=job, cluster=cluster).directory.parent
        os.utime(directory, (minute * 60, minute * 60))


def test_the_jobs_that_were_checked_last_come_first(root: Path) -> None:
    checked(root, 9, 21, 17)

    assert [job.job for job in listed(root)] == ["17", "21", "9"]
    assert [job.job for job in listed(root, count=2)] == ["17", "21"]


@pytest.mark.root
def test_what_others_lay_beside_ones_jobs_changes_none(root: Path) -> None:
    checked(root, 12, 13)
    beside = root / "lab" / f"12.{'0' * 16}"
    beside.mkdir(mode=0o700)
    os.chown(beside, 1, 1)
    for number, job in enumerate(("12", "13")):
        link = root / "lab" / f"99_{number}"
        link.symlink_to(job)
        os.chown(link, 1, 1, follow_symlinks=False)

    found = [job.found for job in listed(root) if job.job in ("12", "13")]
    assert found.count("train.sh finished after 41 s") == 2


@pytest.mark.root
def test_no_journal_of_another_user_is_read_in_roots_own_process(root: Path) -> None:
    checked(root, 13)
    run = write_healthy_run(root, job=12)
    with journal.path_of(run.directory, journal.MASTER).open("ab") as file:
        file.truncate(240 << 20)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
    given_to(1, run.directory.parent)

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jobs = {job.job: job.found for job in listed(root)}
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib

    assert jobs["13"] == jobs["12"] == "train.sh finished after 41 s"
    assert grown_kib < 64 << 10


def test_a_job_is_told_by_its_last_check_and_whom_it_left(root: Path) -> None:
    write_requeued_job(root)

    (job,) = listed(root)

    assert (job.script, job.nodes, job.attempts) == ("train.sh", 5, 2)
    assert job.found == (
        "attempt 2: moved away from n3; train.sh finished after 41 s; n3 faulty (network, over 99 %"
        " sure)"
    )
    assert job.state == "finished"


def test_a_job_that_waits_is_listed_before_it_has_a_journal(root: Path, slurm: FakeSlurm) -> None:
    checked(root, 12)
    slurm.run_job(13, ["n1", "n2"], state="PENDING", Reason="Priority", name="a name")
    held = "job requeued in held state"  # as Slurm says it
    slurm.run_job("14_[3-9]", ["n1"], state="PENDING", Reason=held, name="a|b")
    slurm.run_job(15, ["n1"], state="COMPLETED")
    slurm.run_job(16, ["n1"], state="CONFIGURING")
    slurm.run_job(17, ["n1"], state="STOPPED")
    for component in ("18+0", "18+1"):
        slurm.run_job(component, ["n1"], state="PENDING")

    jobs = listed(root, slurm.environ())

    assert [(job.job, job.name or job.script, job.state) for job in jobs] == [
        ("18+0", "train", "pending"),
        ("18+1", "train", "pending"),
        ("17", "train", "stopped"),
        ("16", "train", "configuring"),
        ("14_[3-9]", "a|b", f"pending ({held})"),
        ("13", "a name", "pending (Priority)"),
        ("12", "train.sh", "finished"),
    ]


def test_an_id_that_slurm_has_given_again_is_another_job(root: Path, slurm: FakeSlurm) -> None:
    checked(root, 12)
    slurm.run_job(12, ["n1"], state="PENDING", submitted_s=int(STARTED_S) + 3600)

    new, old = listed(root, slurm.environ())

    assert (new.job, new.state, new.found) == ("12", "pending", "not checked yet")
    assert (old.job, old.state) == ("12", "finished")
    slurm.change_job(12, Restarts=1)  # it is the one that was checked
    assert [job.state for job in listed(root, slurm.environ())] == ["pending"]


def test_why_a_script_failed_comes_first(root: Path, slurm: FakeSlurm) -> None:
    run = write_healthy_run(root, job=12)
    run.write(
        journal.POST_MORTEM,
        Diagnosed(
            cause="wrong-arguments",
            description="args.py: error: unrecognized arguments: --lrr",
            attribution="user error",
            sureness="certain",
        ),
    )

    (job,) = listed(root, slurm.environ())

    assert job.found == "args.py: error: unrecognized arguments: --lrr; user error, certain"
    assert [len(listed(root, name=name)) for name in ("train.sh", "other.sh")] == [1, 0]


def test_an_array_is_one_line(root: Path, slurm: FakeSlurm) -> None:
    for job, task in ((13, 1), (14, 2), (12, 3)):
        directory = write_healthy_run(root, job=job, array=f"12_{task}").directory.parent
        os.utime(directory, (task, task))
        slurm.run_job(f"12_{task}", ["n1"], state="RUNNING")
    slurm.run_job("12_[4-9]", ["n1"], state="PENDING")

    (array,) = listed(root, slurm.environ())

    assert array.job == "12"
    assert array.found.startswith("3 tasks checked; 12_3: train.sh finished")
    assert array.state == "3 running, 1 pending"


def test_a_journal_that_cannot_be_read_or_has_no_check_is_listed_with_why(root: Path) -> None:
    checked(root, 9)
    run = RunJournal(root, job=12)
    path = journal.path_of(run.directory, journal.MASTER)
    path.unlink()
    path.mkdir()
    (root / "lab" / "14").mkdir(mode=0o700)
    RunJournal(root, job=15)

    found = {job.job: job.found for job in listed(root)}

    assert found["12"].startswith("its journal cannot be read: ")
    assert found["9"].startswith("train.sh finished")
    assert found["14"] == "its journal has no check"
    assert "index" not in found["15"]


def test_the_jobs_of_one_cluster_can_be_asked_for(root: Path) -> None:
    checked(root, 12, cluster="east")
    checked(root, 12, cluster="west")

    assert [job.cluster for job in listed(root)] == ["west", "east"]
    assert [job.cluster for job in listed(root, cluster="east")] == ["east"]
    assert "12 west" in list_text(listed(root), Page())


def test_why_slurm_did_not_answer_comes_first(root: Path, slurm: FakeSlurm) -> None:
    slurm.set(refuse={"--noheader": "slurm_load_jobs error: Unable to contact slurm controller"})
    found = asked_for(root, slurm.environ())

    assert found.unasked == (
        "squeue failed with code 1: slurm_load_jobs error: Unable to contact slurm controller"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_list_fits_a_terminal(root: Path, width: int) -> None:
    checked(root, 9)
    write_requeued_job(root)
    run = RunJournal(root, job=13, nodes=[f"n{number}" for number in range(9)])
    run.start(script="/home/ml/a-long-name-of-a-script-of-somebody.sh")
    run.master(VerdictReached(nodes=[]))

    lines = list_text(listed(root), Page(width=width, unicode=False)).splitlines()

    assert all(line.isascii() and line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= max(width, 66)  # names are not broken
    assert "13" in {line.split()[0] for line in lines if line}
