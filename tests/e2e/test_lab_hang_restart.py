# SPDX-License-Identifier: Apache-2.0
"""A training that hangs is ended and started again, on a spare: `--monitor=restart`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import Site, eventually, records_in
from tests.lab.played_nodes import UNREACHABLE, play, submit

# Without a slurmdbd, Slurm 22.05 makes a job smaller once, and refuses that then.
ACCOUNTING = "LAB_RELEASE" not in os.environ
pytestmark = [
    pytest.mark.lab(accounting=ACCOUNTING),
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(900),
]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
# The first start hangs, the others train for some steps. What comes behind the step must not run
# once the script is ended for its hang.
SCRIPT = f"""#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + 10 * SLURM_JOB_ID + SLURM_HEALTH_RESTART_COUNT))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
echo "start $SLURM_HEALTH_RESTART_COUNT on $SLURM_JOB_NODELIST"
[ "$SLURM_HEALTH_RESTART_COUNT" -lt "${{HANGS:-1}}" ] || \\
    {{ TRAINS="$TRAINS --steps=5"; set --; }}
srun {sys.executable} training.py $TRAINS "$@" || code=$?
echo "behind the step $SLURM_HEALTH_RESTART_COUNT"
exit "${{code:-0}}"
"""
# Without a line in the script, and without a word: steps of a second until the hang.
TRAINS = "--step-s=1 --steps=100000"
SILENT = {"TRAINS": f"{TRAINS} --silent --at=70", "SLURM_HEALTH_HEARTBEAT": "off"}
BEATING = {"TRAINS": f"{TRAINS} --heartbeat --at=45"}
ENDED_S = 800.0
BY_OPTIMIZER = {"TRAINS": f"{TRAINS} --silent --at=45", "SLURM_HEALTH_HEARTBEAT": "auto"}
SPARE = ("-N3", "--ntasks-per-node=1", "--spares=1", "--max-restarts=1", "-x", "n5")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=5, accounting=ACCOUNTING) as lab:
        yield Site(lab)


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    for left in site.lab.home("alice").glob("pid-*"):
        left.unlink()
    play(site)
    return site


def began(site: Site, *words: str, env: Mapping[str, str]) -> int:
    options = [word for word in words if word.startswith("-")] or [*SPARE]
    arguments = [word for word in words if not word.startswith("-")]
    named = ("--output=out-%j.txt", "--no-requeue", "--monitor=restart")
    return submit(site, *options, *named, "train.sh", *arguments, script="", env=env)


def output(site: Site, job: int) -> str:
    return site.read(f"out-{job}.txt")


def plans(site: Site, job: int) -> list[str]:
    return [record["plan"] for record in site.records(job, writer="restart")]


def ended(site: Site, job: int) -> dict[str, str]:
    return site.ended(job, ENDED_S)


@pytest.mark.parametrize(
    ("cause", "env", "found"),
    [
        ("stop", SILENT, "rank-stopped"),
        ("stop", BY_OPTIMIZER, "rank-stopped"),
        ("kill-held", BEATING, "rank-gone"),
    ],
    ids=["stopped, no step is known", "stopped, the optimizer reports steps", "gone"],
)
def test_a_rank_that_keeps_the_others_waiting_is_replaced_with_its_node_by_the_spare(
    training: Site, cause: str, env: Mapping[str, str], found: str
) -> None:
    job = began(training, cause, "1", env=env)

    record = ended(training, job)
    said = output(training, job)
    assert record["JobState"] == "COMPLETED", said
    assert "start 1 on n[1,3-4]" in said
    assert "behind the step 0" not in said
    hang = training.wait_record(job, "training_event", writer="monitor")
    print(f"{found}: {hang['stalled_s']} s after the last step")
    assert (hang["diagnosed"]["cause"], hang["diagnosed"]["nodes"]) == (found, ["n2"])
    assert bool(hang.get("at_rest")) == (env is SILENT)
    assert plans(training, job) == ["check"]
    # Nothing is held against the node, and it stays in the job as its spare.
    assert training.drained() == {}
    assert expand(record["NodeList"]) == ("n1", "n2", "n3", "n4")
    table = training.table(job)
    assert "ended the script" in table
    assert "train.sh started again on n[1,3-4]" in table
    (kept,) = training.run_directory(job).glob("hang-*.json")
    assert '"ranks"' in kept.read_text()
    if cause == "kill-held":  # its data loader's worker: without cgroups Slurm does not know of it
        for left in training.processes_with(TRAINING.name):
            os.kill(left, signal.SIGKILL)
    training.assert_nothing_left()


def test_a_node_whose_packets_are_dropped_is_left(training: Site) -> None:
    job = began(training, env=BY_OPTIMIZER)

    def trains() -> bool:
        writer = training.run_directory(job) / "monitor.jsonl"
        records = records_in(writer) if writer.exists() else []
        steps = [r.get("step", 0) for r in records if r["kind"] == "progress_seen"]
        return max(steps, default=0) >= 20

    eventually(training, trains, "a training that is watched", 300)
    play(training, n2=UNREACHABLE)
    training.lab.fault.drop("n2")

    assert ended(training, job)["JobState"] == "COMPLETED", output(training, job)
    assert "start 1 on n[1,3-4]" in output(training, job)
    assert "n2 faulty" in training.table(job).replace("  ", " ")
    hang = training.wait_record(job, "training_event", writer="monitor")
    print(f"{hang['diagnosed']['cause']}: {hang['stalled_s']} s after the last step")
    assert "n2" in hang["diagnosed"]["nodes"]


@pytest.mark.parametrize("cause", ["mismatch", "own-code"])
def test_what_hangs_by_the_script_itself_is_ended_and_not_started_again(
    training: Site, cause: str
) -> None:
    job = began(training, cause, "1", env=BEATING)

    assert ended(training, job)["JobState"] == "FAILED"
    said = output(training, job)
    assert "the script is ended because it hangs (--monitor=restart)" in said
    assert "train.sh is not started again" in said
    assert "start 1" not in said
    assert plans(training, job) == ["stop"]
    training.assert_nothing_left()
