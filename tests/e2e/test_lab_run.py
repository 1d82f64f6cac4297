# SPDX-License-Identifier: Apache-2.0
"""`srun slurm-health run` on the lab: a small DDP training, with and without bad nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.commands import Result
from tests.lab.installed_site import COMMAND, DEADLINE_S, Site

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

TRAIN = Path(__file__).parents[2] / "examples" / "train_torchrun.py"


@pytest.fixture
def trained(site: Site) -> Iterator[Site]:
    """The site, with a training script in alice's home; nothing is left running afterwards."""
    site.script("train.py", TRAIN.read_text())
    yield site
    site.assert_nothing_left()


def srun(site: Site, nodes: int, *words: str, tasks: int = 1) -> Result:
    """Run `srun slurm-health run` as alice."""
    argv = ["srun", f"-N{nodes}", f"--ntasks-per-node={tasks}", COMMAND, "run", *words]
    return site.lab.run(
        argv, user="alice", check=False, env={"OMP_NUM_THREADS": "1"}, deadline_s=2 * DEADLINE_S
    )


def last_job(site: Site) -> int:
    """The job of the newest journal."""
    journals = site.lab.home("alice") / ".slurm-health" / "journal" / "lab"
    return max(int(path.name) for path in journals.iterdir())


def said_by_us(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("slurm-health: ")]


def test_an_agent_that_is_killed_is_started_again_by_its_task(trained: Site) -> None:
    trained.lab.fault.kill_agent("n2")
    result = srun(trained, 3, "--network-check", "train.py", "--epochs=1")
    assert result.returncode == 0, result
    assert "3 processes" in result.stdout
    assert said_by_us(result)[-1].endswith("all healthy")
    ends = [
        r for r in trained.records(last_job(trained), "0-2", "n2") if r["kind"] == "agent_ended"
    ]
    assert "SIGKILL" in ends[0]["reason"]
