# SPDX-License-Identifier: Apache-2.0
"""The example batch script for containers, with a real one that an ordinary user may start.

bubblewrap stands where a site has apptainer: it gives the tasks a root directory,
processes and users of their own, and needs no daemon, no image and no rights.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import COMMAND, DEADLINE_S, Site
from tests.lab.played_nodes import FAKE_WORKER, FAULTY

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.lab,
    pytest.mark.torch,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
TEMPLATE = "container.sbatch"
CONTAINER = re.compile(r"^container=\(.*\)$", re.MULTILINE)
# Nothing outside has this directory, and nothing inside has /boot.
MARK = "in-the-container"
LOOK = (
    '#!/usr/bin/env python3\nimport os\nprint("runs on", os.uname().nodename, *os.listdir("/"))\n'
)


@pytest.fixture(autouse=True)
def _needs_bubblewrap(site: Site) -> None:
    if site.lab.run(["sh", "-c", "command -v bwrap"], check=False).returncode:
        pytest.skip("no bwrap where the lab's Slurm is installed (python -m tests.lab install)")


def container(site: Site) -> list[str]:
    """The words that run a command in a container which shows Python, torch and alice's home."""
    imports = [Path(entry) for entry in sys.path if Path(entry).is_dir()]
    shown = dict.fromkeys([Path(sys.prefix), Path("/usr"), *imports, ROOT])
    words = ["bwrap", "--die-with-parent", "--unshare-pid", "--unshare-user", "--dir", f"/{MARK}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    words += ["--ro-bind", "/sys", "/sys", "--ro-bind", "/etc", "/etc"]
    for path in shown:
        words += ["--ro-bind", str(path), str(path)]
    for link in ("bin", "lib", "lib64"):
        words += ["--symlink", f"usr/{link}", f"/{link}"]
    home = str(site.lab.home("alice"))
    return [*words, "--bind", home, home]


def submit(site: Site, *words: str, check: str = f"check --act --python={FAKE_WORKER} ||") -> int:
    """Submit the template with its one line edited, and `check` as the line of the check."""
    text = (ROOT / "sbatch_templates" / TEMPLATE).read_text()
    assert len(CONTAINER.findall(text)) == 1
    line = f"container=({shlex.join(container(site))})"
    text = CONTAINER.sub(lambda _: line, text).replace("check --act ||", check)
    path = site.script(TEMPLATE, text)
    played = {"FAKE_WORKER_DIR": site.directory("played")}
    here = f"{Path(COMMAND).parent}:{Path(sys.executable).parent}"
    result = site.lab.run(
        ["sbatch", "--parsable", "--output=job-%j.out", *words[:-1], path, *words[-1].split()],
        user="alice",
        env={"PATH": f"{here}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", **played},
    )
    return int(result.stdout)


def output_of(site: Site, job: int, *, tasks: int) -> str:
    ended = site.ended(job, 3 * DEADLINE_S)
    text = site.read(f"job-{job}.out")
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), text
    site.assert_nothing_left()
    # Each task has a file of its own.
    return text + "".join(site.read(f"train-{job}-{task}.out") for task in range(tasks))


@pytest.mark.slow
def test_the_tasks_see_the_containers_root_and_the_job_leaves_a_bad_node(site: Site) -> None:
    where = site.script("where.py", LOOK)
    played_nodes.play(site, n2=FAULTY)
    text = output_of(site, submit(site, "-N4", "--ntasks-per-node=1", where), tasks=4)
    told = [line.split() for line in text.splitlines() if line.startswith("runs on")]
    assert len({node for _, _, node, *_ in told} - {"n2"}) == 4
    assert all(MARK in words and "boot" not in words for words in told)


def test_the_check_can_run_with_the_containers_own_torch(site: Site) -> None:
    where = site.script("where.py", LOOK)
    inside = f'#!/bin/sh\nexec {shlex.join(container(site))} python3 "$@"\n'
    program = site.script("container-python", inside)
    text = output_of(
        site,
        # A busy machine may leave doubt, which is not what this is about.
        submit(
            site,
            "-N2",
            "--ntasks-per-node=1",
            where,
            check=f"check --act --python={program} || [ $? = 3 ] ||",
        ),
        tasks=2,
    )
    assert re.search(r"n\[1-2\]: \d+ rounds?", text)
    assert "cannot" not in text
    assert MARK in text


@pytest.mark.slow
def test_run_checks_and_trains_inside_the_container(site: Site) -> None:
    train = site.script("train.py", (ROOT / "examples" / "train_torchrun.py").read_text())
    words = [*container(site), COMMAND, "run", "--network-check", train, "--epochs=1"]
    job = site.lab.sbatch(
        f"#!/bin/sh\nexport OMP_NUM_THREADS=1\nsrun --ntasks-per-node=1 {shlex.join(words)}",
        "-N2",
        "--output=job-%j.out",
    )
    text = output_of(site, job, tasks=0)
    assert "n[1-2]: " in text
    assert "all healthy" in text
    assert "2 processes" in text
    assert site.report(job)["runs"]
