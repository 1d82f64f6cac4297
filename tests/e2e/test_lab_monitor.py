# SPDX-License-Identifier: Apache-2.0
"""A DDP training on the lab that hangs in one way after another: what its owner is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab import processes
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(400),
]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
SCRIPT = f"""#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + SLURM_JOB_ID))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun {sys.executable} training.py --step-s=1 --steps=100000 $TRAINS "$@"
"""
MONITOR = "slurm_health.training.monitor.agent"
AT_45 = "--heartbeat --at=45"
LIMIT_S = 60.0


@pytest.fixture
def training(site: Site) -> Site:
    """The site, with a training in alice's home."""
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    for left in site.lab.home("alice").glob("pid-*"):
        left.unlink()
    play(site)
    return site


def began(site: Site, *words: str, trains: str = "--heartbeat") -> int:
    """Submit the training with these arguments, on three nodes whose check is played."""
    options = ["-N3", "--ntasks-per-node=1", "--output=out-%j.txt", "--no-requeue"]
    options += [word for word in words if word.startswith("--")]
    arguments = [word for word in words if not word.startswith("--")]
    return submit(site, *options, "train.sh", *arguments, script="", env={"TRAINS": trains})


def watched(site: Site) -> None:
    """Wait until each node has its agent, and the training has stepped for a while."""
    eventually(site, lambda: len(monitors(site)) >= 3, "three agents", 150)
    outputs = site.lab.home("alice").glob("out-*.txt")
    newest = max(outputs, key=lambda path: path.stat().st_mtime)
    eventually(site, lambda: "step 20 " in newest.read_text(), "steps", 150)


def monitors(site: Site) -> list[int]:
    return site.processes_with(MONITOR)


def output(site: Site, number: int) -> str:
    return site.read(f"out-{number}.txt")


def hang(site: Site, number: int) -> dict[str, Any]:
    """Wait for what the monitor finds."""
    record = site.wait_record(number, "training_event", writer="monitor")
    found: dict[str, Any] = record["diagnosed"]
    text = output(site, number)
    assert "slurm-health: monitor: no step for" in text
    assert found["description"] in text
    assert found.get("accused", []) == []
    print(f"{found['cause']}: {record['stalled_s']} s after the last step")
    assert record["stalled_s"] <= LIMIT_S
    return found


def tell(site: Site, rank: int, name: str) -> None:
    """Send a signal to the process of a rank."""
    site.lab.run(["kill", f"-{name}", site.read(f"pid-{rank}")], user="alice")


def test_a_rank_that_is_stopped_is_named_and_the_training_goes_on_when_it_may(
    training: Site,
) -> None:
    number = began(training)
    watched(training)
    tell(training, 1, "STOP")
    found = hang(training, number)

    assert (found["cause"], found["sureness"]) == ("rank-stopped", "certain")
    assert (found["ranks"], found["nodes"]) == ([1], ["n2"])
    tell(training, 1, "CONT")
    eventually(training, lambda: "the training goes on" in output(training, number), "it", 150)
    assert "the training goes on" in output(training, number)
    assert "rank-stopped" in str(training.report(number)["runs"][0]["events"])
    assert "kill -CONT" in output(training, number)


@pytest.mark.parametrize("how", [["scancel"], ["scancel", "--signal=KILL", "--full"]])
def test_a_job_that_is_cancelled_while_it_is_watched_leaves_nothing(
    training: Site, how: list[str]
) -> None:
    number = began(training)
    watched(training)
    training.lab.run([*how, str(number)], user="alice")
    training.ended(number)

    training.assert_nothing_left()
    assert "monitor:" not in output(training, number)


def test_a_job_that_is_to_be_stopped_when_it_hangs_is_cancelled(training: Site) -> None:
    number = began(training, "--monitor=stop", "own-code", "1", trains=AT_45)
    found = hang(training, number)

    assert found["cause"] == "rank-elsewhere"
    assert training.ended(number)["JobState"] == "CANCELLED"
    assert "cancelled because it hangs" in output(training, number)
    training.assert_nothing_left()


def test_a_job_that_is_no_training_has_agents_which_say_nothing_and_leave_with_it(
    training: Site,
) -> None:
    script = "sleep 45; squeue -hs -j $SLURM_JOB_ID -o 'step %j'; srun -N3 hostname"
    number = submit(training, "-N3", "--output=out-%j.txt", script=script)
    watch = "slurm_health.training.monitor.watch"
    eventually(training, lambda: training.processes_with(watch), "the watch", 100)
    assert training.ended(number)["JobState"] == "COMPLETED"

    said = output(training, number)
    assert "monitor" not in said
    assert {"n1", "n2", "n3"} <= set(said.split())
    kinds = {record["kind"] for record in training.records(number, writer="monitor")}
    assert kinds <= {"progress_seen"}  # of the output
    training.assert_nothing_left()


def test_an_agent_that_dies_is_started_again_and_the_node_is_never_blamed(training: Site) -> None:
    number = began(training)
    watched(training)
    killed = monitors(training)
    for process in processes.on_node(training.lab.pid("n2")):
        if MONITOR in process.argv:
            os.kill(process.pid, signal.SIGKILL)
    eventually(training, lambda: "the agent on n2 ended" in output(training, number), "it", 120)
    eventually(training, lambda: len(set(monitors(training)) - set(killed)) >= 1, "a new one", 60)
    tell(training, 1, "STOP")
    found = hang(training, number)

    assert (found["cause"], found["ranks"]) == ("rank-stopped", [1])
    assert "does not answer" not in output(training, number)
