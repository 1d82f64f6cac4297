# SPDX-License-Identifier: Apache-2.0
"""Jobs in the shape that other tools tell their users to write, submitted with one word more.

The tools and the trainings are real, on CPUs. What a check before them measures is as `play` says,
but for one. The packages come with `make test-slow`; without them these tests say what is missing.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from tests.lab.installed_site import COMMAND, DEADLINE_S, Site, accused, levels
from tests.lab.played_nodes import FAKE_WORKER, UNREACHABLE, play, submit

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
# Where the interpreter that trains is, with the commands of its packages.
TRAINING = Path(sys.executable).parent
# Each process loads a framework, on processors that the nodes of the lab share.
ENDED_S = 6 * DEADLINE_S

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1200)]
with_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: make test-slow installs Open MPI as root"
)


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"no {package}: make test-slow installs it")


def lay_out(site: Site) -> dict[str, str]:
    """Put the jobs into alice's home; what their environment needs."""
    for path in (*JOBS.iterdir(), ROOT / "examples" / "train_torchrun.py"):
        if path.is_file():
            site.script(path.name, path.read_text())
    return {"TRAINING": str(TRAINING)}


def finished(site: Site, job: int) -> str:
    ended = site.ended(job, ENDED_S)
    text = site.read("recipe.out")
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert accused(site.report(job)["runs"][-1]) == {}, site.table(job)
    site.assert_nothing_left()
    return text


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        pytest.param(name, printed, marks=[needs(package), *more])
        for name, package, more, printed in (
            ("pytorch-tutorial.sh", "torch", [], "2 processes"),
            ("accelerate.sh", "accelerate", [with_mpi], "trained with 2 processes"),
            ("lightning.sh", "lightning", [], "trained with 4 processes"),
            ("deepspeed.sh", "deepspeed", [], "trained with 2 processes"),
            ("jax.sh", "jax", [], "trained with 2 processes"),
            ("ray.sh", "ray", [], "ran on 2 nodes: n1 n2"),
            ("mpi.sh", "mpi4py", [with_mpi], "sum of the ranks 6, 4 processes"),
        )
    ],
)
def test_a_recipe_is_checked_and_runs(site: Site, name: str, printed: str) -> None:
    play(site)
    job = submit(site, "--output=recipe.out", name, script="", env=lay_out(site))
    assert printed in finished(site, job)


@needs("torch")
def test_probes_run_in_the_environment_that_the_setup_file_activates(site: Site) -> None:
    environ = lay_out(site) | {"TRAINING": site.directory("env")}
    noted = f'echo "$@" >> {site.lab.home("alice")}/used'
    site.script("env/python3", f'#!/bin/sh\n{noted}\nexec {sys.executable} "$@"\n')
    site.script("env/torchrun", f'#!/bin/sh\nexec {TRAINING}/torchrun "$@"\n')
    job = site.submit("--output=recipe.out", "--check=quick", "pytorch-tutorial.sh", env=environ)
    assert "2 processes" in finished(site, job)
    assert "worker.py" in site.read("used")


@needs("lightning")
def test_lightning_trains_on_the_good_nodes_where_there_is_a_spare(site: Site) -> None:
    play(site, n2=UNREACHABLE)
    words = ("--output=recipe.out", "--spares=1", "lightning.sh")
    job = submit(site, *words, script="", env=lay_out(site))
    ended = site.ended(job, ENDED_S)
    assert "trained with 4 processes" in site.read("recipe.out")
    assert (ended["NodeList"], ended["Restarts"]) == ("n[1,3]", "0")


@needs("submitit")
def test_submitit(site: Site) -> None:
    play(site)
    environ = lay_out(site)
    site.script("bin/sbatch", f'#!/bin/sh\nexec {COMMAND} sbatch "$@"\n')
    environ |= {"SLURM_HEALTH_PYTHON": str(FAKE_WORKER)}
    environ |= {"FAKE_WORKER_DIR": site.directory("played")}
    done = site.lab.run(
        ["bash", "submitit.sh"], user="alice", env=environ, check=False, deadline_s=ENDED_S
    )
    assert "returned ['2 processes on 2 nodes', '2 processes on 2 nodes']" in done.stdout, done
    job = int(done.stdout.split()[1])
    assert levels(site.report(job)["runs"][-1]) == {"n1": "healthy", "n2": "healthy"}
