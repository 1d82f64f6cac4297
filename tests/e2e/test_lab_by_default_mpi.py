# SPDX-License-Identifier: Apache-2.0
"""MPI jobs of plain `sbatch`, without torch, on a cluster that has every job checked by default.

Slurm, MPI, its jobs, the light probes and the fault are real.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.installed_site import COMMAND, DEADLINE_S, Site

CONF = "/etc/slurm/slurm.conf"
# The tests' own interpreter has a torch, which a check that may choose would find.
RULES = "[default]\nmin_nodes = 2\ncheck = 'light'\n"
SUM = """
from mpi4py import MPI

world = MPI.COMM_WORLD
hosts = sorted(set(world.allgather(MPI.Get_processor_name())))
total = world.allreduce(world.rank)
if world.rank == 0:
    print("MPI", world.size, "ranks, sum", total, "on", *hosts, flush=True)
"""
JOB = """#!/bin/sh
#SBATCH --ntasks-per-node=2
{launch} python3 sum.py
"""
STARTERS = {"Open MPI": "mpirun --map-by node", "MPICH": "mpiexec"}


def mpi() -> tuple[Path, str] | None:
    """Where the MPI on PATH lies, and which it is; None without one that Python can use."""
    found = shutil.which("mpiexec")
    if found is None:
        return None
    python = Path(found).with_name("python3")
    words = [str(python), "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return Path(found).parent, next((name for name in STARTERS if name in said), "")


MPI = mpi()
pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        MPI is None, reason="no mpiexec on PATH, with mpi4py in a python3 beside it"
    ),
]


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster on which every job of two nodes is checked by default."""
    assert MPI is not None
    visible = [] if MPI[0] == Path("/usr/bin") else [MPI[0].parent]
    with Lab.start(nodes=4, visible=visible) as lab:
        site = Site(lab)
        rules = lab.paths.etc / "rules.toml"
        rules.write_text(RULES)
        lab.run([COMMAND, "init", "default", f"--config={rules}"])
        lab.run(["sed", "-i", "1i JobSubmitPlugins=lua", CONF])
        lab.run(["scontrol", "reconfigure"])
        yield site


def hosts(site: Site, launch: str) -> tuple[str, list[str]]:
    """Submit an MPI job of two nodes as its user does; the job, and where its ranks ran."""
    assert MPI is not None
    site.script("sum.py", SUM)
    script = site.script("job.sh", JOB.format(launch=launch))
    argv = ["sbatch", "--parsable", "-N2", "--open-mode=append", script]
    path = f"{MPI[0]}:/usr/bin:/bin"
    job = site.lab.run(argv, user="alice", env={"PATH": path}).stdout.strip()
    assert site.ended(job, 2 * DEADLINE_S)["JobState"] == "COMPLETED"
    said = site.read(f"slurm-{job}.out")
    found = re.findall(r"^MPI 4 ranks, sum 6 on (n\d) (n\d)$", said, re.MULTILINE)
    assert len(found) == 1, said
    return job, sorted(found[0])


def checks(site: Site, job: str) -> list[set[str]]:
    """What each attempt's check of a job says of its nodes, and that no torch was used."""
    runs = site.report(job)["runs"]
    seen = [each["unseen"] for each in runs]
    assert all(each.startswith("light probes") for each in seen), seen
    return [{f"{node['node']} {node['level']}" for node in each["nodes"]} for each in runs]


def test_a_job_of_mpirun_leaves_a_node_that_loses_its_packets(site: Site) -> None:
    assert MPI is not None
    site.lab.fault.drop("n1")
    job, ran_on = hosts(site, STARTERS[MPI[1]])
    first, *_, last = checks(site, job)
    assert "n1" not in ran_on
    assert any(each.startswith("n1 ") and each != "n1 healthy" for each in first)
    assert last == {f"{node} healthy" for node in ran_on}
