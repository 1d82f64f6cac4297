# SPDX-License-Identifier: Apache-2.0
"""Training that goes on: a failed script is started again, on a spare where a node is at fault."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import UNREACHABLE, play, submit

# Without a slurmdbd, Slurm 22.05 makes a job smaller once, and refuses that then. Of other releases
# the lab has none, and they need none for that.
ACCOUNTING = "LAB_RELEASE" not in os.environ
pytestmark = [pytest.mark.heavy, pytest.mark.lab(accounting=ACCOUNTING), pytest.mark.timeout(400)]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
SCRIPT = f"""\
#!/bin/bash
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((29500 + SLURM_HEALTH_RESTART_COUNT))
echo "start $SLURM_HEALTH_RESTART_COUNT"
exec srun --kill-on-bad-exit=1 {sys.executable} training.py "$@" \\
    --checkpoint=ck-$SLURM_JOB_ID.pt --steps=8 --at=4 --first-start --timeout-s=120
"""
# What a job of several nodes does, without torch: each node says so, until one fails.
NODES = """\
#!/bin/bash
echo "start $SLURM_HEALTH_RESTART_COUNT attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
echo "ran on $(srun hostname | sort | xargs)"
echo "one by one $(for i in 1 2 3; do srun -N1 -n1 hostname & done | sort | xargs)"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
[ "$SLURM_HEALTH_RESTART_COUNT" -ge "${FAILS:-1}" ] || exec srun sleep 600
"""
KEPT = ("-N3", "--ntasks-per-node=1", "--spares=1", "--max-restarts=1", "-x", "n5")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster whose controller gives a silent node up after half a minute.

    It hears the answers of all nodes that it asked together only when the last of them has answered
    or is given up as silent, after ten seconds (MessageTimeout) and more. With ten seconds, it took
    well nodes for lost together with the one that was: "not responding, setting DOWN" and "returned
    to service" within a millisecond.
    """
    with Lab.start(nodes=5, accounting=ACCOUNTING, slurm_conf_extra="SlurmdTimeout=30") as lab:
        yield Site(lab)


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    site.script("nodes.sh", NODES)
    play(site)
    return site


def output(site: Site, job: int) -> str:
    return site.read(f"slurm-{job}.out")


def plans(site: Site, job: int) -> list[tuple[str, list[str]]]:
    """What was planned after each failure, and the nodes held at fault."""
    return [(r["plan"], r.get("nodes", [])) for r in site.records(job, writer="restart")]


@pytest.mark.torch
def test_a_killed_rank_is_checked_for_and_training_resumes_from_its_checkpoint(
    training: Site,
) -> None:
    options = ("-N2", "--ntasks-per-node=1", "--max-restarts=2")
    job = submit(training, *options, "train.sh", "kill", "1", script="")

    assert training.ended(job)["JobState"] == "COMPLETED", output(training, job)
    said = output(training, job)
    assert "begin at 0, restart 0" in said
    assert "begin at 4, restart 1" in said
    assert [int(step) for step in re.findall(r"^step (\d+)", said, re.MULTILINE)] == [*range(8)]
    assert "starting train.sh again" in said
    assert plans(training, job) == [("check", [])]
    assert "train.sh started again" in training.table(job)
    # Where the rank was killed is what the check looked at most.
    assert training.records(job, "0-2")[0]["prior"] == {"n2": 0.1}
    assert training.drained() == {}


@pytest.mark.slow
def test_a_plain_srun_runs_on_all_nodes_but_the_kept_spare(training: Site) -> None:
    words = ("-N3", "--ntasks=3", *KEPT[2:], "--wrap", NODES.rpartition("[ ")[0])
    job = submit(training, *words, script="")

    record, said = training.ended(job), output(training, job)
    assert record["JobState"] == "COMPLETED", said
    assert record["NodeList"] == "n[1-4]"  # it still had them all at its end
    assert "attempt 0 on n[1-3]" in said
    assert "ran on n1 n2 n3" in said
    assert set(re.findall(r"one by one (.*)", said)[0].split()) <= {"n1", "n2", "n3"}
    training.assert_nothing_left()


def begun(site: Site, job: int) -> None:
    eventually(site, lambda: "one by one" in output(site, job), "the script", 150)


@pytest.mark.parametrize(
    "loss", ["slurmd killed", pytest.param("powered off", marks=pytest.mark.slow)]
)
def test_a_lost_node_is_replaced_by_the_spare_without_a_requeue(training: Site, loss: str) -> None:
    job = submit(training, *KEPT, "nodes.sh", script="")
    begun(training, job)
    if loss == "slurmd killed":
        training.lab.fault.kill_slurmd("n3")
        # What slurmctld does after SlurmdTimeout.
        down = ["NodeName=n3", "State=DOWN", "Reason=not responding"]
        training.lab.run(["scontrol", "update", *down])
    else:
        training.lab.fault.drop("n3", everything=True)

    record = training.ended(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0"), output(training, job)
    assert record["NodeList"] == "n[1-2,4]"
    said = output(training, job)
    assert "start 1 attempt 0 on n[1-2,4]" in said
    assert said.rindex("ran on n1 n2 n4") > said.index("start 1")
    # Slurm may give a node up before or after the script's end: it is at fault, or in doubt.
    assert plans(training, job) in ([("check", [])], [("check", ["n3"])])
    table = training.table(job)
    assert "nodes.sh started again on n[1-2,4]" in table
    # In doubt, where Slurm gives it up only once its agent cannot be started.
    # Its row then stays as the first check decided it.
    in_doubt = r"^(n3 +(faulty|undecided)|FOUND .*undecided)"
    assert re.search(in_doubt, table, re.MULTILINE), table


@pytest.mark.slow
@pytest.mark.parametrize("requeue", ["--requeue", "--no-requeue"])
def test_a_job_whose_batch_host_is_lost_does_not_run_on_without_it(
    training: Site, requeue: str
) -> None:
    job = submit(training, *KEPT, requeue, "nodes.sh", script="")
    begun(training, job)
    training.lab.fault.drop("n1", everything=True)

    # Slurm itself takes the node out, and lets the job run on.
    left = training.lab.wait_until(
        lambda: training.lab.job(job), lambda now: now["NodeList"] == "n[2-4]", "a lost node", 60
    )
    assert left["JobState"] == "RUNNING"
    over = training.lab.wait_until(
        lambda: training.lab.job(job), lambda now: now["JobState"] != "RUNNING", "its end", 200
    )
    assert over["Restarts"] == ("1" if requeue == "--requeue" else "0")
    if requeue == "--no-requeue":
        assert over["JobState"] in {"CANCELLED", "COMPLETING"}


def test_a_node_that_the_check_finds_faulty_is_replaced_by_the_spare(training: Site) -> None:
    job = submit(training, *KEPT, "nodes.sh", script="")
    begun(training, job)
    play(training, n2=UNREACHABLE)
    # Kill the step that sleeps: a task that is not there yet does not hear the first signal.
    eventually(training, lambda: sleeping(training, job), "the step that sleeps")
    (step,) = sleeping(training, job)

    def ended() -> bool:
        training.lab.run(["scancel", "--signal=KILL", step], check=False)
        return step not in sleeping(training, job)

    eventually(training, ended, f"the end of step {step}")

    record = training.ended(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0"), output(training, job)
    said = output(training, job)
    assert "start 1 attempt 0 on n[1,3-4]" in said
    # The end of the step that held the spare is no failure of the script's.
    assert "srun: error: n4" not in said
    assert "ON n4 CANCELLED" not in said
    assert plans(training, job) == [("check", [])]
    assert expand(record["NodeList"]) == ("n1", "n3", "n4")


def sleeping(site: Site, job: int) -> list[str]:
    lines = site.lab.ask("squeue", "-hs", "-o", "%i %j").stdout.splitlines()
    found = [line.split() for line in lines]
    return [step for step, name in found if name == "sleep" and step.startswith(f"{job}.")]
