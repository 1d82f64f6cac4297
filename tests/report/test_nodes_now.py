# SPDX-License-Identifier: Apache-2.0
"""What became of a job's nodes after it: Slurm's notes on those that are out of use."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.report.find import load
from slurm_health.report.layout import Page
from slurm_health.report.nodes_now import nodes_now, out_of_use
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import STARTED_S, write_healthy_run

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
