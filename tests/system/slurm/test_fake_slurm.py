# SPDX-License-Identifier: Apache-2.0
"""The fake Slurm answers as a real one: the same commands to both, compared where we read them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from slurm_health.records.nodeset import expand
from slurm_health.system.slurm.parsing import LISTED_NODE, listed_node_of
from tests.lab import Lab
from tests.lab.records import parse_record
from tests.support.fake_slurm import FakeSlurm

NODES = ("n1", "n2", "n3", "n4")
# Of a job, as the fake plays it.
JOB_FIELDS = (
    *("ArrayJobId", "ArrayTaskId", "JobState", "Reason", "Priority", "NodeList", "ReqNodeList"),
    *("ExcNodeList", "BatchFlag", "Requeue", "Restarts", "Partition", "Account", "QOS"),
)
SLEEPS = "#!/bin/sh\nsleep 600\n"


class Answer(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    stdout: str
    stderr: str


class Slurm(Protocol):
    """Somewhere to run Slurm's commands as root."""

    def ask(self, *argv: str) -> Answer:
        """Run a command to its end."""

    def start_job(self, *options: str) -> str:
        """Let a job of two nodes run, or wait where its options say so; its id."""

    def reserve(self) -> None:
        """Keep n3 and n4 in the reservation `mine`; n3 has two features."""


class Real:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def ask(self, *argv: str) -> Answer:
        done = self.lab.ask(*argv, check=False)
        return Answer(done.returncode, done.stdout.strip(), done.stderr.strip())

    def start_job(self, *options: str) -> str:
        job = self.lab.sbatch(SLEEPS, "-N2", "--job-name=train", *options, user="root")
        self.lab.wait_job(job, {"RUNNING"})
        return str(job)

    def reserve(self) -> None:
        words = ("StartTime=now", "Duration=60", "Users=root", "Nodes=n[3-4]")
        self.ask("scontrol", "create", "ReservationName=mine", *words)
        self.ask("scontrol", "update", "NodeName=n3", "Features=h100,ib")


class Fake:
    def __init__(self, slurm: FakeSlurm) -> None:
        slurm.set(admin=True, partition_nodes="n[1-4]")
        self.slurm = slurm
        self.started = 0

    def ask(self, *argv: str) -> Answer:
        done = subprocess.run(
            argv, env=self.slurm.environ(), capture_output=True, text=True, check=False, timeout=60
        )
        return Answer(done.returncode, done.stdout.strip(), done.stderr.strip())

    def start_job(self, *options: str) -> str:
        self.started += 1
        changes = {"Requeue": 0} if "--no-requeue" in options else {}
        self.slurm.run_job(self.started, NODES[:2], **changes)
        return str(self.started)

    def reserve(self) -> None:
        self.slurm.set(reservations={"mine": ["n[3-4]", "SPEC_NODES"]})
        self.slurm.change_node("n3", features="h100,ib")


def record(slurm: Slurm, *what: str) -> dict[str, str]:
    """Return the fields of the one thing that scontrol shows."""
    return parse_record(slurm.ask("scontrol", "show", *what).stdout)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.start(nodes=NODES) as lab:
        yield lab


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.lab)])
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm]:
    if request.param == "fake":
        yield Fake(FakeSlurm(tmp_path / "slurm", NODES))
        return
    lab: Lab = request.getfixturevalue("lab")
    yield Real(lab)
    lab.ask("scontrol", "delete", "ReservationName=mine", check=False)
    for features in ("ActiveFeatures=", "AvailableFeatures="):
        lab.ask("scontrol", "update", "NodeName=n3", features)
    lab.reset()


def job_fields(slurm: Slurm, job: str) -> dict[str, str]:
    """Return what we read of a job; a field that Slurm leaves out is not there."""
    shown = slurm.ask("scontrol", "show", "job", "-o", job)
    assert shown.code == 0, shown
    record = parse_record(shown.stdout)
    # Of a priority it only matters whether it is 0, which means held.
    record["Priority"] = "0" if record["Priority"] == "0" else "some"
    record["NodeList"] = ",".join(expand(record["NodeList"])) if record["NodeList"] else ""
    return {name: record[name] for name in JOB_FIELDS if name in record}


RUNNING = {
    "JobState": "RUNNING",
    "Reason": "None",
    "Priority": "some",
    "NodeList": "n1,n2",
    "ReqNodeList": "(null)",
    "ExcNodeList": "(null)",
    "BatchFlag": "1",
    "Requeue": "1",
    "Restarts": "0",
    "Partition": "main",
    "Account": "(null)",
    "QOS": "(null)",
}


def test_a_running_job_is_shown_in_these_fields(slurm: Slurm) -> None:
    assert job_fields(slurm, slurm.start_job()) == RUNNING


def await_pending(slurm: Slurm, job: str) -> dict[str, str]:
    for _ in range(600):
        fields = job_fields(slurm, job)
        if fields["JobState"] == "PENDING":
            return fields
    raise AssertionError(fields)


def test_a_job_that_is_requeued_and_held_keeps_a_list_once_it_is_pending(slurm: Slurm) -> None:
    job = slurm.start_job()
    assert slurm.ask("scontrol", "requeuehold", job) == (0, "", "")
    held = {"JobState": "PENDING", "Priority": "0", "Restarts": "1", "NodeList": ""}
    fields = await_pending(slurm, job)
    assert fields == {**RUNNING, **held, "Reason": fields["Reason"]}
    changes = ("ExcNodeList=n[1-2]", "StartTime=now")
    assert slurm.ask("scontrol", "update", f"JobId={job}", *changes) == (0, "", "")
    assert job_fields(slurm, job)["ExcNodeList"] == "n[1-2]"
    assert slurm.ask("scontrol", "release", job) == (0, "", "")
    assert job_fields(slurm, job)["Priority"] == "some"


def test_a_comment_and_a_size_are_those_of_squeue(slurm: Slurm) -> None:
    job = slurm.start_job()
    comment = ("squeue", "--noheader", f"--jobs={job}", "--format=%k")
    size = "NumNodes:.20,NumCPUs:.20,NumTasks:.20"
    assert slurm.ask(*comment) == (0, "(null)", "")
    slurm.ask("scontrol", "update", f"JobId={job}", "Comment=mine: JobState=X  it's")
    assert slurm.ask(*comment) == (0, "mine: JobState=X  it's", "")
    shown = slurm.ask("squeue", "--noheader", f"--jobs={job}", f"--Format={size}")
    assert shown.stdout.split() == ["2", "2", "2"]


def test_a_helper_is_submitted_found_by_its_name_and_cancelled(slurm: Slurm) -> None:
    slurm.start_job()
    words = ["--job-name=helper", "--chdir=/", "--exclude=n1", "--wrap=sleep 600"]
    found = ("squeue", "--noheader", "--user=0", "--name=helper", "--format=%A")
    assert slurm.ask(*found) == (0, "", "")
    submitted = slurm.ask("sbatch", "--parsable", "--output=/dev/null", *words)
    assert submitted.code == 0
    helper = submitted.stdout.partition(";")[0]
    assert slurm.ask(*found) == (0, helper, "")
    assert slurm.ask("scancel", helper) == (0, "", "")
    # One that had begun is listed until its node says that it has ended.
    while (listed := slurm.ask(*found)) == (0, helper, ""):
        time.sleep(0.1)
    assert listed == (0, "", "")


def test_a_node_that_is_drained_is_shown_with_who_said_why(slurm: Slurm) -> None:
    update = ("scontrol", "update", "NodeName=n[3-4]", "State=DRAIN")
    assert slurm.ask(*update, "Reason=slurm-health: job 1: a b") == (0, "", "")
    shown = slurm.ask("scontrol", "show", "node", "-o", "n[3-4]")
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NodeName=n3", "NodeName=n4"]
    for record in map(parse_record, lines):
        assert "DRAIN" in record["State"].split("+")
        assert record["Reason"].startswith("slurm-health: job 1: a b [root@")
        assert record["Partitions"] == "main"


def test_a_node_that_is_undrained_has_no_reason_any_more(slurm: Slurm) -> None:
    update = ("scontrol", "update", "NodeName=n3")
    slurm.ask(*update, "State=DRAIN", "Reason=a b")
    assert slurm.ask(*update, "State=UNDRAIN") == (0, "", "")
    shown = record(slurm, "node", "-o", "n3")
    assert "DRAIN" not in shown["State"].split("+")
    assert "Reason" not in shown


def test_partitions_are_shown_in_one_line_each(slurm: Slurm) -> None:
    shown = slurm.ask("scontrol", "show", "partition", "-a", "-o")
    (record,) = map(parse_record, shown.stdout.splitlines())
    wanted = {"PartitionName": "main", "Default": "YES", "MaxNodes": "UNLIMITED", "Nodes": "n[1-4]"}
    assert {name: record[name] for name in wanted} == wanted


def test_the_features_of_nodes_and_the_nodes_of_reservations_are_shown(slurm: Slurm) -> None:
    job = slurm.start_job()
    assert record(slurm, "job", "-o", job)["Features"] == "(null)"
    assert record(slurm, "node", "-o", "n3")["AvailableFeatures"] == "(null)"
    assert slurm.ask("scontrol", "show", "reservation", "-o").stdout == (
        "No reservations in the system"
    )
    slurm.reserve()
    shown = record(slurm, "reservation", "-o")
    wanted = {"ReservationName": "mine", "Nodes": "n[3-4]", "Flags": "SPEC_NODES"}
    assert {name: shown[name] for name in wanted} == wanted
    assert record(slurm, "node", "-o", "n3")["AvailableFeatures"] == "h100,ib"


def test_nodes_of_a_partition_are_listed_with_their_states(slurm: Slurm) -> None:
    slurm.start_job()
    words = ("--Node", "--partition=main", f"--format={LISTED_NODE}")
    lines = slurm.ask("sinfo", "--noheader", *words).stdout
    nodes = {node.name: node for line in lines.splitlines() if (node := listed_node_of(line))}
    assert (nodes["n2"].state, nodes["n4"].state) == ("mixed", "idle")
    assert not nodes["n4"].out_of_pool
    assert nodes["n4"].least == 1
