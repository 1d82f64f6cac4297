# SPDX-License-Identifier: Apache-2.0
"""A DDP training that hangs, of a job or of `run`: reported, ended, or started again."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab, processes
from tests.lab.installed_site import COMMAND, Site, eventually
from tests.lab.played_nodes import play, submit
from tests.support.unshared import played_python

# Without a slurmdbd, Slurm 22.05 makes a job smaller once, and refuses that then.
ACCOUNTING = "LAB_RELEASE" not in os.environ
pytestmark = [
    pytest.mark.lab(accounting=ACCOUNTING),
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
# The first start hangs, the others train for some steps. What comes behind the step must not run
# once the script is ended for its hang.
SCRIPT = f"""#!/bin/bash
start=${{SLURM_HEALTH_RESTART_COUNT:-0}}
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + 10 * SLURM_JOB_ID + start))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
echo "start $start on $SLURM_JOB_NODELIST"
[ "$start" -lt 1 ] || {{ TRAINS="$TRAINS --steps=5"; set --; }}
srun {sys.executable} training.py $TRAINS "$@" || code=$?
echo "behind the step $start"
exit "${{code:-0}}"
"""
TRAINS = "--step-s=1 --steps=100000"
RUN = f"""#!/bin/bash
#SBATCH -N3 --ntasks-per-node=1 --output=run-%j.out --no-requeue
export OMP_NUM_THREADS=1
srun {COMMAND} run "$@" training.py "$CAUSE" 1 --silent --step-s=1 --at=45 --times=1 --steps=60
"""
STEPS = {"TRAINS": f"{TRAINS} --heartbeat"}
BEATING = {"TRAINS": f"{TRAINS} --heartbeat --at=45"}
# Without a line in the script; and without a word: steps of a second until the hang.
BY_OPTIMIZER = {"TRAINS": f"{TRAINS} --silent --at=45", "SLURM_HEALTH_HEARTBEAT": "auto"}
SILENT = {"TRAINS": f"{TRAINS} --silent --at=70", "SLURM_HEALTH_HEARTBEAT": "off"}
MONITOR = "slurm_health.training.monitor.agent"
THREE = ("-N3", "--ntasks-per-node=1")
SPARE = (*THREE, "--spares=1", "--max-restarts=1", "-x", "n5", "--monitor=restart")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=5, accounting=ACCOUNTING) as lab:
        yield Site(lab)


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    site.script("run.sh", RUN)
    for pattern in ("pid-*", "training.failed-*"):
        for left in site.lab.home("alice").glob(pattern):
            left.unlink()
    play(site)
    return site


def began(
    site: Site, options: Sequence[str], *arguments: str, env: Mapping[str, str] = STEPS
) -> int:
    """Submit the training with these arguments, on nodes whose check is played."""
    named = ("--output=out-%j.txt", "--no-requeue")
    return submit(site, *named, *options, "train.sh", *arguments, script="", env=env)


def output(site: Site, job: int) -> str:
    return site.read(f"out-{job}.txt")


# --- what its owner is told -----------------------------------------------------------------------


def watched(site: Site, job: int) -> list[int]:
    """Wait until the other nodes have agents, and the training has stepped for a while; those."""
    eventually(site, lambda: len(site.processes_with(MONITOR)) >= 2, "two agents", 150)
    eventually(site, lambda: "step 20 " in output(site, job), "steps", 150)
    return site.processes_with(MONITOR)


def hang(site: Site, job: int) -> dict[str, Any]:
    record = site.wait_record(job, "training_event", writer="monitor")
    found: dict[str, Any] = record["diagnosed"]
    text = output(site, job)
    assert "slurm-health: monitor: no step for" in text
    assert found["description"] in text
    assert found.get("accused", []) == []
    assert record["stalled_s"] <= 60.0
    return found


def test_a_rank_that_is_stopped_is_named_and_the_training_goes_on_when_it_may(
    training: Site,
) -> None:
    """An agent that dies before is started again, and its node is never blamed."""
    job = began(training, THREE)
    killed = watched(training, job)
    for process in processes.on_node(training.lab.pid("n2")):
        if MONITOR in process.argv:
            os.kill(process.pid, signal.SIGKILL)
    eventually(training, lambda: "the agent on n2 ended" in output(training, job), "it", 120)
    agents = training.processes_with
    eventually(training, lambda: set(agents(MONITOR)) - set(killed), "a new agent", 60)
    training.lab.run(["kill", "-STOP", training.read("pid-1")], user="alice")
    found = hang(training, job)

    assert (found["cause"], found["sureness"]) == ("rank-stopped", "certain")
    assert (found["ranks"], found["nodes"]) == ([1], ["n2"])
    training.lab.run(["kill", "-CONT", training.read("pid-1")], user="alice")
    eventually(training, lambda: "the training goes on" in output(training, job), "it", 150)
    assert "rank-stopped" in str(training.report(job)["runs"][0]["events"])
    assert "kill -CONT" in output(training, job)
    assert "does not answer" not in output(training, job)


def test_a_job_that_is_killed_while_it_is_watched_leaves_nothing(training: Site) -> None:
    job = began(training, THREE)
    watched(training, job)
    training.lab.run(["scancel", "--signal=KILL", "--full", str(job)], user="alice")
    training.ended(job)

    training.assert_nothing_left()
    assert "monitor:" not in output(training, job)


def test_a_job_that_is_no_training_has_agents_which_say_nothing_and_leave_with_it(
    training: Site,
) -> None:
    script = "sleep 45; squeue -hs -j $SLURM_JOB_ID -o 'step %j'; srun -N3 hostname"
    job = submit(training, "-N3", "--output=out-%j.txt", script=script)
    watch = "slurm_health.training.monitor.watch"
    eventually(training, lambda: training.processes_with(watch), "the watch", 100)
    assert training.ended(job)["JobState"] == "COMPLETED"

    said = output(training, job)
    assert "monitor" not in said
    assert {"n1", "n2", "n3"} <= set(said.split())
    kinds = {record["kind"] for record in training.records(job, writer="monitor")}
    assert kinds <= {"progress_seen"}  # of the output
    training.assert_nothing_left()


# --- the script is ended --------------------------------------------------------------------------


def test_a_job_that_is_to_be_stopped_when_it_hangs_is_cancelled(training: Site) -> None:
    job = began(training, (*THREE, "--monitor=stop"), "own-code", "1", env=BEATING)

    assert hang(training, job)["cause"] == "rank-elsewhere"
    assert training.ended(job)["JobState"] == "CANCELLED"
    assert "cancelled because it hangs" in output(training, job)
    training.assert_nothing_left()


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
    job = began(training, SPARE, cause, "1", env=env)

    record = training.ended(job, 800.0)
    said = output(training, job)
    assert record["JobState"] == "COMPLETED", said
    assert "start 1 on n[1,3-4]" in said
    assert "behind the step 0" not in said
    event = training.wait_record(job, "training_event", writer="monitor")
    assert (event["diagnosed"]["cause"], event["diagnosed"]["nodes"]) == (found, ["n2"])
    assert bool(event.get("at_rest")) == (env is SILENT)
    assert [r["plan"] for r in training.records(job, writer="restart")] == ["check"]
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


# --- `slurm-health run` in steps of a job ---------------------------------------------------------


ENDS = """\
#!/bin/bash
#SBATCH -N3 --ntasks-per-node=1 --output=ends.out --no-requeue
export FAKE_WORKER_DIR={played}
run() {{ srun --overlap "$@" {command} run --python={python} --network-check train.py; }}
{body}
"""


def submitted(site: Site, tmp_path: Path, body: str, **behaviours: str) -> int:
    """Submit a script that calls `run`, on nodes that behave so."""
    play(site, **behaviours)
    site.script("train.py", "")
    python = site.script("python", played_python(tmp_path, trains=False).read_text())
    (site.lab.home("alice") / "ends.out").unlink(missing_ok=True)
    script = ENDS.format(played=site.directory("played"), command=COMMAND, python=python, body=body)
    words = ["sbatch", "--parsable", site.script("ends.sh", script)]
    return int(site.lab.run(words, user="alice").stdout)


def test_two_steps_at_once_are_checked_and_train_apart(site: Site, tmp_path: Path) -> None:
    job = submitted(site, tmp_path, "run & run & wait")
    site.ended(job)
    text = site.read("ends.out")
    assert text.count("all healthy") == 2, text
    assert text.count("TRAINS") == 6
    assert len(site.report(job)["runs"]) == 2
    site.assert_nothing_left()


@pytest.mark.parametrize("word", ["the job", "the step"])
def test_a_check_that_is_cancelled_leaves_nothing(site: Site, tmp_path: Path, word: str) -> None:
    job = submitted(site, tmp_path, "run", n2="stuck")
    eventually(site, lambda: "round 0" in site.read("ends.out"), "a check has begun", 200)
    site.lab.run(["scancel", str(job) if word == "the job" else f"{job}.0"], user="alice")
    site.ended(job)
    site.assert_nothing_left()
    assert "TRAINS" not in site.read("ends.out")


def ran(site: Site, *words: str, nodes: int, state: str) -> str:
    """Submit the batch script to Slurm's own sbatch; return its output once it has ended so."""
    argv = ["sbatch", "--parsable", f"-N{nodes}", "--export=ALL,CAUSE=stop", "run.sh", *words]
    job = int(site.lab.run(argv, user="alice").stdout)
    found, said = site.ended(job, 1100)["JobState"], site.read(f"run-{job}.out")
    assert found == state, said
    site.assert_nothing_left()
    return said


def test_one_that_trains_alone_is_ended_by_its_torchrun_and_its_job_is_not_cancelled(
    training: Site,
) -> None:
    words = ("--standalone", "--nproc-per-node=2", "--monitor=stop")
    said = ran(training, *words, nodes=1, state="FAILED")
    assert "rank 1 on n1 has been stopped by a signal" in said
    assert "the training ends: it hangs (--monitor=stop)" in said


def test_one_that_is_to_be_restarted_when_it_hangs_goes_on_after_a_check(training: Site) -> None:
    words = ("--monitor=restart", "--max-restarts=1")
    said = ran(training, *words, nodes=3, state="COMPLETED")
    assert "the training hung: rank 1 on n2 has been stopped by a signal" in said
    assert "checking n[1-3] before the workers start (restart 1 of 1)" in said
