# SPDX-License-Identifier: Apache-2.0
"""What Slurm says of a job that has no journal, and of the nodes of one that has."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.report.find import load
from slurm_health.report.layout import Page
from slurm_health.report.slurm_now import explain, nodes_now, out_of_use
from slurm_health.system.slurm.parsing import Job
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import STARTED_S, write_healthy_run

OURS = "#!/bin/sh\nexec python3 -E -P -m slurm_health supervise --check=standard -- x\n"


def job(*states: str, reason: str = "None", **fields: str) -> Job:
    return Job(job_id=12, states=frozenset(states), reason=reason, fields=fields)


@pytest.mark.parametrize(
    ("found", "script", "said"),
    [
        (job("PENDING", reason="Resources"), OURS, "it is pending (Resources): its nodes are"),
        (job("PENDING"), OURS, "it is pending: its nodes are checked when it starts."),
        (
            job("PENDING", reason="PartitionConfig"),
            OURS,
            "it is pending (PartitionConfig): it cannot start as it was submitted: its partition",
        ),
        (job("PENDING"), "#!/bin/sh\ntrue\n", "not submitted with slurm-health sbatch"),
        (job("RUNNING"), "#!/bin/sh\ntrue\n", "nothing was checked (running)"),
        (job("RUNNING", NodeList="n1", StdOut="/a/s.out"), OURS, "Its output, /a/s.out, says why."),
        (job("CANCELLED"), OURS, "it ended before a check began (cancelled)."),
        (job("FAILED"), "", "it ended before a check began (failed)."),
    ],
)
def test_what_slurm_knows_says_why_there_is_no_journal(found: Job, script: str, said: str) -> None:
    assert said in explain(found, script)


def test_a_job_that_never_started_has_no_output_to_look_at() -> None:
    assert "output" not in explain(job("CANCELLED", StdOut="/a/s.out"), OURS)


def test_of_somebody_elses_job_it_is_said_whom_to_ask() -> None:
    bobs = job("RUNNING", UserId="bob(1002)")

    said = explain(bobs, "", uid=1001)

    assert "it is bob's job (running)" in said
    assert "ask bob, or an administrator, for `slurm-health report 12`" in said
    assert "bob" not in explain(bobs, OURS, uid=1002)


NODES = ["n1", "n2", "n4", "n5", "n6"]
NOTE = "shealth: gpu 3 lost"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm", [*NODES, "n7"])
    for name in ("n4", "n7"):
        slurm.change_node(name, state="IDLE+DRAIN", reason=NOTE)
    return slurm


def lines(
    root: Path, slurm: FakeSlurm, *, cluster: str = "lab", later_s: float = 60.0
) -> list[str]:
    write_healthy_run(root, cluster=cluster)
    out = out_of_use(load(root, "12"), now_s=STARTED_S + later_s, environ=slurm.environ())
    return nodes_now(out, Page())


def test_a_node_of_the_job_that_was_drained_since_is_told_with_why(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    head, line = lines(tmp_path / "journal", slurm)

    assert head.split()[:2] == ["NOW", "STATE"]
    assert line.split(maxsplit=2)[:2] == ["n4", "idle+drain"]
    assert f"{NOTE} [root@" in line


def test_nothing_is_told_of_the_nodes_of_an_old_job_or_of_another_cluster(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    assert lines(tmp_path / "old", slurm, later_s=8 * 86400.0) == []
    assert slurm.calls("scontrol") == []
    assert lines(tmp_path / "other", slurm, cluster="east") == []


def test_nothing_is_told_where_slurm_does_not_answer(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.set(refuse={"node": "slurm_load_node: Unable to contact slurm controller"})

    assert lines(tmp_path / "journal", slurm) == []
