# SPDX-License-Identifier: Apache-2.0
"""What listens on another node leaves with the batch node, and asks Slurm if that is silent."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rows import rows
from tests.support.supervised import eventually, write_executable

PULSE_S = 0.05
RESTARTS = 2  # so often had Slurm started the job again when its script began
RUNS = {"state": "RUNNING", "nodes": "n[1-2]", "requeue": "1", "restarts": str(RESTARTS)}


class Listening:
    """The process on another node; its Slurm shows job 7 as `facts`, and notes what is called."""

    def __init__(self, directory: Path) -> None:
        self._facts = directory / "facts"
        self.refuse = directory / "refuse"
        self._calls = directory / "calls"
        self._calls.touch()
        self.show()
        scontrol = f"""#!/bin/sh
echo "$*" >> {self._calls}
case $1 in
    show) cat {self._facts} ;;
    requeue) [ ! -e {self.refuse} ] || {{ echo "Job is completing" >&2; exit 1; }} ;;
esac
"""
        write_executable(directory / "scontrol", scontrol)
        write_executable(directory / "scancel", f'#!/bin/sh\necho "scancel $*" >> {self._calls}\n')
        module = "slurm_health.training.monitor.batch_node"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "7", "n1", f"{PULSE_S}", f"{RESTARTS}"],
            stdin=subprocess.PIPE,
            env={"PATH": f"{directory}:/usr/bin:/bin"},
        )

    def show(self, **facts: str) -> None:
        """Have Slurm show the job so from now on."""
        job = {**RUNS, **facts}
        new = self._facts.with_name("new")
        new.write_text(
            f"JobId=7 JobState={job['state']} Requeue={job['requeue']} Restarts={job['restarts']}"
            f" NodeList={job['nodes']} NumNodes=2\n"
        )
        new.replace(self._facts)

    def calls(self, what: str = "") -> list[str]:
        """Return all calls of a kind, or all that change the job."""
        lines = self._calls.read_text().splitlines()
        return [line for line in lines if (line.startswith(what) if what else line[:4] != "show")]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    listening = Listening(tmp_path)
    with listening.process:
        yield listening
        listening.process.kill()


def test_it_leaves_with_the_batch_script(listening: Listening) -> None:
    assert listening.process.stdin is not None
    listening.process.stdin.close()
    assert listening.process.wait(30) == 0
    assert listening.calls() == []


@rows
def test_a_job_that_may_still_have_its_batch_node_is_left_alone(
    listening: Listening, facts: dict[str, str]
) -> None:
    listening.show(**facts)
    asked = len(listening.calls("show"))
    eventually(lambda: len(listening.calls("show")) > asked + 1, "questions")

    assert listening.process.poll() is None
    assert listening.calls() == []


@rows
def test_a_job_that_has_lost_it_is_given_back_once(
    listening: Listening, facts: dict[str, str], calls: list[str]
) -> None:
    listening.show(**facts)
    assert listening.process.wait(30) == 0

    assert listening.calls() == calls


def test_one_that_cannot_be_requeued_at_the_moment_is_not_cancelled(listening: Listening) -> None:
    listening.refuse.touch()
    listening.show(nodes="n[2-3]")
    eventually(lambda: len(listening.calls("requeue 7")) > 1, "a second try")
    listening.refuse.unlink()
    assert listening.process.wait(30) == 0
    assert listening.calls("scancel") == []
