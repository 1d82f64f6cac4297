# SPDX-License-Identifier: Apache-2.0
"""The example batch scripts, submitted with sbatch as a site would, with a tiny training."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.lab.installed_site import COMMAND, DEADLINE_S, Site, records_in
from tests.lab.played_nodes import FAKE_WORKER, play

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "sbatch_templates"
TESTED = {
    "check-then-torchrun.sbatch",
    "container.sbatch",
    "mpirun.sbatch",
    "srun-mpi.sbatch",
    "straggler-detection.sbatch",
    "sweep.sbatch",
    "task-per-gpu.sbatch",
    "torchrun-with-check.sbatch",
}


def submit(site: Site, template: str, *options: str, script: str) -> int:
    train = site.script(script, (ROOT / "examples" / script).read_text())
    return submit_with(site, template, *options, words=(train, "--epochs=1"))


def submit_with(
    site: Site, template: str, *options: str, words: tuple[str, ...], text: str = ""
) -> int:
    """Submit a template as alice, with slurm-health and torchrun on her PATH; the job's id.

    What it starts is real; what a check before that measures is as `play` says, but in `text`.
    """
    played = (TEMPLATES / template).read_text().replace("--act", f"--act --python={FAKE_WORKER}")
    path = site.script(template, text or played)
    here = f"{Path(COMMAND).parent}:{Path(sys.executable).parent}"
    output = () if template == "sweep.sbatch" else ("--output=job-%j.out",)
    result = site.lab.run(
        ["sbatch", "--parsable", *output, *options, path, *words],
        user="alice",
        env={"PATH": f"{here}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    return int(result.stdout)


def output_of(site: Site, job: int) -> str:
    ended = site.ended(job, 3 * DEADLINE_S)
    text = site.read(f"job-{job}.out")
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    site.assert_nothing_left()
    return text


def test_every_template_is_tested() -> None:
    assert {path.name for path in TEMPLATES.glob("*.sbatch")} == TESTED


@pytest.mark.heavy
def test_check_then_torchrun(site: Site) -> None:
    play(site)
    job = submit(site, "check-then-torchrun.sbatch", "-N2", script="train_torchrun.py")
    text = output_of(site, job)
    assert "n[1-2]: " in text
    assert "all healthy" in text
    assert "2 processes" in text


@pytest.mark.slow
def test_torchrun_with_check_leaves_the_bad_node_out(site: Site) -> None:
    """An agent that is killed is started again by its task."""
    site.lab.fault.drop("n3")
    site.lab.fault.kill_agent("n2")
    job = submit(site, "torchrun-with-check.sbatch", "-N4", script="train_torchrun.py")
    text = output_of(site, job)
    assert "n3 is LEFT OUT: faulty" in text
    assert "3 processes" in text
    assert site.lab.job(job)["Restarts"] == "0"
    ends = [r for r in site.records(job, "0-2", "n2") if r["kind"] == "agent_ended"]
    assert "SIGKILL" in ends[0]["reason"]


@pytest.mark.slow
def test_straggler_detection_checks_with_training_steps_and_trains_on_all(site: Site) -> None:
    job = submit(site, "straggler-detection.sbatch", "-N3", script="train_torchrun.py")
    assert "3 processes" in output_of(site, job)
    checks = site.run_directory(job).parent.glob("*/master.jsonl")
    started = [each for path in checks for each in records_in(path) if "settings" in each]
    assert [each["settings"]["check"] for each in started] == ["straggler-detection"]


@pytest.mark.heavy
def test_task_per_gpu(site: Site) -> None:
    play(site)
    job = submit(site, "task-per-gpu.sbatch", "-N2", "--ntasks-per-node=2", script="train.py")
    text = output_of(site, job)
    assert "all healthy" in text
    # examples/train.py calls each of its ranks a node.
    assert "epoch 0  4 nodes" in site.read(f"train-{job}-0.out")


NEEDS_MPIRUN = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun: make test-slow installs it"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "prefix"),
    [
        ("srun-mpi.sbatch", "$SLURM_PROCID of $SLURM_NTASKS"),
        pytest.param(
            "mpirun.sbatch",
            "$OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE",
            marks=NEEDS_MPIRUN,
        ),
    ],
)
def test_ranks_of_mpi_run_after_the_check(site: Site, template: str, prefix: str) -> None:
    play(site)
    ranks = site.script("ranks.sh", f"#!/bin/sh\necho rank {prefix} $1\n")
    text = output_of(site, submit_with(site, template, "-N2", words=("sh", ranks, "input.dat")))
    assert "all healthy" in text
    assert sorted(line for line in text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 input.dat" for rank in range(4)
    ]


@pytest.mark.slow
def test_sweep(site: Site) -> None:
    job = submit(site, "sweep.sbatch", "--array=0-1", script="train_torchrun.py")
    for task, rate in enumerate(("1e-2", "3e-3")):
        ended = site.ended(f"{job}_{task}", 3 * DEADLINE_S)
        text = site.read(f"sweep-{job}_{task}.out")
        assert ended["ExitCode"] == "0:0", text
        assert f"learning rate {rate}" in text
        assert "1 processes" in text
        assert len(site.report(f"{job}_{task}")["runs"]) == 1
    site.assert_nothing_left()


# --- containers -----------------------------------------------------------------------------------


# Nothing outside has this directory, and nothing inside has /boot.
MARK = "in-the-container"
LOOK = (
    '#!/usr/bin/env python3\nimport os\nprint("runs on", os.uname().nodename, *os.listdir("/"))\n'
)


def container(site: Site) -> str:
    """The words that run a command in a container which shows Python, torch and alice's home.

    bubblewrap stands where a site has apptainer: it gives the tasks a root directory, processes
    and users of their own, and needs no daemon, no image and no rights.
    """
    imports = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    words = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-user", "--dir", f"/{MARK}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for shown in dict.fromkeys(["/sys", "/etc", sys.prefix, "/usr", *map(str, imports), str(ROOT)]):
        words += ["--ro-bind", shown, shown]
    for link in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{link}", f"/{link}"]
    home = str(site.lab.home("alice"))
    return shlex.join([*words, "--bind", home, home])


@pytest.mark.heavy
@pytest.mark.torch
def test_in_a_container_tasks_see_its_root_and_the_check_its_torch(site: Site) -> None:
    if site.lab.run(["sh", "-c", "command -v bwrap"], check=False).returncode:
        pytest.skip("no bwrap where the lab's Slurm is installed (python -m tests.lab install)")
    where, inside = site.script("where.py", LOOK), container(site)
    program = site.script("container-python", f'#!/bin/sh\nexec {inside} python3 "$@"\n')
    text = (TEMPLATES / "container.sbatch").read_text()
    text, count = re.subn(r"(?m)^container=\(.*\)$", lambda _: f"container=({inside})", text)
    assert count == 1
    # A busy machine may leave doubt, which is not what this is about.
    text = text.replace("check --act ||", f"check --act --python={program} || [ $? = 3 ] ||")
    options = ("-N2", "--ntasks-per-node=1")
    job = submit_with(site, "container.sbatch", *options, words=(where,), text=text)
    output = output_of(site, job)
    assert re.search(r"n\[1-2\]: \d+ rounds?", output)
    assert "cannot" not in output
    tasks = [site.read(f"train-{job}-{task}.out").split() for task in (0, 1)]  # a file for each
    assert {words[2] for words in tasks} == {"n1", "n2"}
    assert all(MARK in words and "boot" not in words for words in tasks)
