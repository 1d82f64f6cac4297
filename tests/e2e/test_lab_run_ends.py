# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run` in steps of a job: how they end, and how they are watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.installed_site import COMMAND, Site, eventually
from tests.lab.played_nodes import play
from tests.support.unshared import played_python

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(1200)]

SCRIPT = """\
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
    script = SCRIPT.format(
        played=site.directory("played"), command=COMMAND, python=python, body=body
    )
    words = ["sbatch", "--parsable", site.script("ends.sh", script)]
    return int(site.lab.run(words, user="alice").stdout)


def checks(site: Site) -> None:
    eventually(site, lambda: "round 0" in site.read("ends.out"), "a check has begun", 200)


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
    checks(site)
    site.lab.run(["scancel", str(job) if word == "the job" else f"{job}.0"], user="alice")
    site.ended(job)
    site.assert_nothing_left()
    assert "TRAINS" not in site.read("ends.out")


# --- a training that hangs ------------------------------------------------------------------------


TRAINING = Path(__file__).parents[1] / "support" / "training.py"
RUN = f"""#!/bin/bash
#SBATCH -N3 --ntasks-per-node=1 --output=run-%j.out --no-requeue
export OMP_NUM_THREADS=1
srun {COMMAND} run "$@" training.py "$CAUSE" 1 --silent --step-s=1 --at=45 --times=1 --steps=60
"""


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("run.sh", RUN)
    for left in site.lab.home("alice").glob("pid-*"):
        left.unlink()
    for left in site.lab.home("alice").glob("training.failed-*"):
        left.unlink()
    return site


def submitted_watched(site: Site, *words: str, cause: str = "stop", nodes: int = 3) -> int:
    """Submit the batch script to Slurm's own sbatch."""
    argv = ["sbatch", "--parsable", f"-N{nodes}", f"--export=ALL,CAUSE={cause}", "run.sh", *words]
    ran = site.lab.run(argv, user="alice")
    return int(ran.stdout)


def test_one_that_trains_alone_is_ended_by_its_torchrun_and_its_job_is_not_cancelled(
    training: Site,
) -> None:
    words = ("--standalone", "--nproc-per-node=2", "--monitor=stop")
    job = submitted_watched(training, *words, nodes=1)

    assert training.ended(job, 1100)["JobState"] == "FAILED", training.read(f"run-{job}.out")
    said = training.read(f"run-{job}.out")
    assert "rank 1 on n1 has been stopped by a signal" in said
    assert "the training ends: it hangs (--monitor=stop)" in said
    training.assert_nothing_left()


def test_one_that_is_to_be_restarted_when_it_hangs_goes_on_after_a_check(training: Site) -> None:
    job = submitted_watched(training, "--monitor=restart", "--max-restarts=1")

    assert training.ended(job, 1100)["JobState"] == "COMPLETED", training.read(f"run-{job}.out")
    said = training.read(f"run-{job}.out")
    assert "the training hung: rank 1 on n2 has been stopped by a signal" in said
    assert "checking n[1-3] before the workers start (restart 1 of 1)" in said
    training.assert_nothing_left()
