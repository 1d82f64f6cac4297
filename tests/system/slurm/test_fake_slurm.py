# SPDX-License-Identifier: Apache-2.0
"""The fake Slurm answers as a real one: the same commands to both, compared where we read them."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    *("Features",),
)
OF_NODE = ("NodeName", "State", "AvailableFeatures", "Reason", "Partitions")
OF_PARTITION = ("PartitionName", "Default", "MaxNodes", "Nodes")
OF_RESERVATION = ("ReservationName", "Nodes", "Flags")
Ask = Callable[..., str]


def of_job(ask: Ask, job: str) -> dict[str, str]:
    """Return what we read of a job; a field that Slurm leaves out is not there."""
    record = parse_record(ask("scontrol", "show", "job", "-o", job))
    # Of a priority it only matters whether it is 0, which means held.
    record["Priority"] = "0" if record["Priority"] == "0" else "some"
    record["NodeList"] = ",".join(expand(record["NodeList"])) if record["NodeList"] else ""
    if record["JobState"] == "PENDING":
        record["Reason"] = ""  # a real one has just put it back
    return {name: record[name] for name in JOB_FIELDS if name in record}


def of_nodes(ask: Ask, names: str) -> list[dict[str, str]]:
    lines = ask("scontrol", "show", "node", "-o", names).splitlines()
    read = [parse_record(line) for line in lines]
    found = [{name: node[name] for name in OF_NODE if name in node} for node in read]
    for node in found:
        node["Reason"] = node.get("Reason", "").partition("@")[0]
        node["State"] = node["State"].replace("+NOT_RESPONDING", "")  # as a lab begins
    return found


def answers(ask: Ask, job: str, reserve: Callable[[], None]) -> Iterator[object]:
    """Yield what is read of a running job of n1 and n2, of its end, of nodes and partitions."""
    yield of_job(ask, job)
    size = "NumNodes:.20,NumCPUs:.20,NumTasks:.20"
    yield ask("squeue", "--noheader", f"--jobs={job}", f"--Format={size}").split()
    listed = ("--Node", "--partition=main", f"--format={LISTED_NODE}")
    for line in ask("sinfo", "--noheader", *listed).splitlines():
        node = listed_node_of(line)
        yield node and (node.name, node.state, node.out_of_pool, node.least)

    yield ask("scontrol", "requeuehold", job)
    while of_job(ask, job)["JobState"] != "PENDING":
        time.sleep(0.1)
    yield of_job(ask, job)
    yield ask("scontrol", "update", f"JobId={job}", "ExcNodeList=n[1-2]", "StartTime=now+9")
    yield of_job(ask, job)
    yield ask("scontrol", "release", job)
    yield of_job(ask, job)["Priority"]
    comment = ("squeue", "--noheader", f"--jobs={job}", "--format=%k")
    yield ask(*comment)
    ask("scontrol", "update", f"JobId={job}", "Comment=mine: JobState=X  it's")
    yield ask(*comment)

    named = ("squeue", "--noheader", "--user=0", "--name=helper", "--format=%A")
    yield ask(*named)
    words = ["--job-name=helper", "--chdir=/", "--exclude=n1", "--wrap=sleep 600"]
    helper = ask("sbatch", "--parsable", "--output=/dev/null", *words).partition(";")[0]
    yield ask(*named) == helper
    yield ask("scancel", helper)
    while ask(*named):  # one that had begun is listed until its node says that it has ended
        time.sleep(0.1)

    reason = "Reason=slurm-health: job 1: a b"
    yield ask("scontrol", "update", "NodeName=n[3-4]", "State=DRAIN", reason)
    yield of_nodes(ask, "n[3-4]")
    yield ask("scontrol", "update", "NodeName=n3", "State=UNDRAIN")
    yield of_nodes(ask, "n3")
    partition = parse_record(ask("scontrol", "show", "partition", "-a", "-o"))
    yield {name: partition[name] for name in OF_PARTITION}
    yield ask("scontrol", "show", "reservation", "-o")
    reserve()
    reservation = parse_record(ask("scontrol", "show", "reservation", "-o"))
    yield {name: reservation[name] for name in OF_RESERVATION}
    yield of_nodes(ask, "n3")[0]["AvailableFeatures"]


def of_fake(directory: Path) -> list[object]:
    slurm = FakeSlurm(directory, NODES)
    slurm.set(admin=True, partition_nodes="n[1-4]")
    slurm.run_job(1, NODES[:2])

    def ask(*argv: str) -> str:
        done = subprocess.run(
            argv, env=slurm.environ(), capture_output=True, text=True, check=True, timeout=60
        )
        return (done.stdout + done.stderr).strip()

    def reserve() -> None:
        slurm.set(reservations={"mine": ["n[3-4]", "SPEC_NODES"]})
        slurm.change_node("n3", features="h100,ib")

    return list(answers(ask, "1", reserve))


def of_real() -> list[object]:
    with Lab.start(nodes=len(NODES)) as lab:
        job = lab.sbatch("#!/bin/sh\nsleep 600\n", "-N2", "--job-name=train", user="root")
        lab.wait_job(job, {"RUNNING"})

        def ask(*argv: str) -> str:
            done = lab.ask(*argv)
            return (done.stdout + done.stderr).strip()

        def reserve() -> None:
            words = ("StartTime=now", "Duration=60", "Users=root", "Nodes=n[3-4]")
            ask("scontrol", "create", "ReservationName=mine", *words)
            ask("scontrol", "update", "NodeName=n3", "Features=h100,ib")

        return list(answers(ask, str(job), reserve))


@pytest.mark.lab
def test_the_fake_answers_as_the_real_one(tmp_path: Path) -> None:
    assert of_fake(tmp_path) == of_real()
