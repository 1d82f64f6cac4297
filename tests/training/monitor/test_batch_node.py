# SPDX-License-Identifier: Apache-2.0
"""Whoever listens for a batch node leaves with it, and asks Slurm only where it is silent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.training.monitor.batch_node import is_lost
from tests.support.supervised import eventually, write_executable

PULSE_S = 0.05


@pytest.mark.parametrize(
    ("states", "nodes", "lost"),
    [
        ({"RUNNING"}, ("n2", "n3"), True),
        ({"RUNNING"}, ("n1", "n2"), False),
        ({"RUNNING"}, (), False),  # Slurm does not say
        ({"COMPLETING"}, ("n2",), False),
        ({"RUNNING", "RESIZING"}, ("n2",), False),
        ({"PENDING"}, ("n2",), False),
    ],
)
def test_a_job_has_lost_its_batch_node_if_it_runs_without_it(
    states: set[str], nodes: tuple[str, ...], *, lost: bool
) -> None:
    assert is_lost("n1", states, nodes) is lost


class Listening:
    """The process on another node; its Slurm says that job 7 runs on `nodes`, and notes calls."""

    def __init__(self, directory: Path) -> None:
        self.calls = directory / "calls"
        self.nodes = directory / "nodes"
        self.requeue = directory / "requeue"
        self.restarts = directory / "restarts"
        self.calls.touch()
        self.nodes.write_text("n[1-2]")
        self.requeue.write_text("1")
        self.restarts.write_text("2")
        scontrol = f"""#!/bin/sh
echo "$*" >> {self.calls}
case $1 in
    show) echo "JobId=7 JobState=RUNNING Requeue=$(cat {self.requeue})" \
        "Restarts=$(cat {self.restarts}) NodeList=$(cat {self.nodes}) NumNodes=2" ;;
    requeue) [ ! -e {directory}/refuse ] || {{ echo "Job is completing" >&2; exit 1; }} ;;
esac
"""
        write_executable(directory / "scontrol", scontrol)
        write_executable(directory / "scancel", f'#!/bin/sh\necho "scancel $*" >> {self.calls}\n')
        argv = [
            sys.executable,
            "-m",
            "slurm_health.training.monitor.batch_node",
            "7",
            "n1",
            f"{PULSE_S}",
            "2",  # so often has Slurm started the job again, as the supervisor tells it
        ]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, env={"PATH": f"{directory}:/usr/bin:/bin"}
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    found = Listening(tmp_path)
    with found.process:
        yield found
        found.process.kill()


def test_it_leaves_with_the_batch_script(listening: Listening) -> None:
    listening.stdin.close()
    assert listening.process.wait(30) == 0
    assert "requeue" not in listening.calls.read_text()


def test_a_job_that_still_has_its_batch_node_is_left_alone(listening: Listening) -> None:
    eventually(lambda: listening.calls.read_text().count("show job") > 1, "questions")
    assert listening.process.poll() is None
    assert "requeue" not in listening.calls.read_text()


@pytest.mark.parametrize(("requeue", "call"), [("1", "requeue 7"), ("0", "scancel 7")])
def test_one_that_has_lost_it_is_requeued_if_it_may_be_and_else_cancelled(
    listening: Listening, requeue: str, call: str
) -> None:
    listening.requeue.write_text(requeue)
    listening.nodes.write_text("n[2-3]")
    assert listening.process.wait(30) == 0
    calls = listening.calls.read_text().splitlines()
    assert [each for each in calls if not each.startswith("show")] == [call]


def test_a_job_that_slurm_has_started_again_elsewhere_is_left_alone(listening: Listening) -> None:
    listening.restarts.write_text("3")
    listening.nodes.write_text("n[3-4]")
    assert listening.process.wait(30) == 0
    calls = listening.calls.read_text().splitlines()
    assert [each for each in calls if not each.startswith("show")] == []


def test_one_that_cannot_be_requeued_at_the_moment_is_not_cancelled(listening: Listening) -> None:
    refuse = listening.calls.parent / "refuse"
    refuse.touch()
    listening.nodes.write_text("n[2-3]")
    eventually(lambda: listening.calls.read_text().count("requeue 7") > 1, "a second try")
    refuse.unlink()
    assert listening.process.wait(30) == 0
    assert "scancel" not in listening.calls.read_text()
