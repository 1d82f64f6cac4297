# SPDX-License-Identifier: Apache-2.0
"""The bell between master and agents goes through a real srun, and a run does without it."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import Site, levels

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

# An agent that rings when it has heard the master; what libraries print is no ring.
AGENT = """
import os, sys, time
from slurm_health.preflight.orders import Bell
bell = Bell(os.environ["SLURMD_NODENAME"])
sys.stdout.write("a library says hello, and no more")
sys.stdout.flush()
print()
print("slurm-health: news of n9", flush=True)
while not bell.heard():
    time.sleep(0.01)
bell.ring()
sys.stdin.read()
"""
MASTER = f"""
import os, sys, time
from slurm_health.records.nodeset import expand
from slurm_health.preflight.master.launcher import SlurmLauncher
nodes = expand(os.environ["SLURM_JOB_NODELIST"])
command = [sys.executable, "-c", {AGENT!r}]
launcher = SlurmLauncher(
    int(os.environ["SLURM_JOB_ID"]), lambda launch, node: command, os.environ, dict
)
launcher.start(0, nodes)
rung, give_up = set(), time.monotonic() + 60
while rung != set(nodes) and time.monotonic() < give_up:
    launcher.ring()
    rung |= launcher.wait(0.5, 0.0)
print(sorted(rung))
launcher.stop(0.0)
"""
# What a user may have set for srun calls of his own.
USERS = {
    "SLURM_UNBUFFEREDIO": "1",
    "SLURM_LABELIO": "1",
    "SLURM_STDINMODE": "none",
    "SLURM_STDOUTMODE": "/dev/null",
    "SLURM_STDERRMODE": "/dev/null",
    "SRUN_ERROR": "none",
    "SRUN_OUTPUT": "none",
    "SRUN_INPUT": "none",
}


@pytest.mark.parametrize("environ", [{}, USERS], ids=["plain", "with variables of the user"])
def test_master_and_agents_hear_each_other_through_srun(
    site: Site, environ: dict[str, str]
) -> None:
    exports = "".join(f"export {name}={value}\n" for name, value in environ.items())
    text = f"#!/bin/sh\n{exports}exec {sys.executable} -c {shlex.quote(MASTER)}\n"
    result = site.allocated(["-N3"], site.script("bell.sh", text))
    assert result.stdout == "['n1', 'n2', 'n3']\n", result


# In each a site's or a user's srun is between the master and Slurm's.
_CUT = {
    "it passes everything on": 'exec "$real" "$@"',
    "it eats both streams": 'exec "$real" "$@" </dev/null >/dev/null',
    "it eats what agents say": 'exec "$real" "$@" >/dev/null',
    "it tears what agents say": '"$real" "$@" | tr e "\\n"',
    "it prints much without an end": '{ head -c 300000 /dev/zero; exec "$real" "$@"; }',
}


@pytest.mark.parametrize("cut", _CUT.values(), ids=list(_CUT))
def test_a_check_whose_bell_is_broken_ends_as_any_other(site: Site, cut: str) -> None:
    played_nodes.play(site, n3="dies")
    site.directory("cut/bin")
    site.script("cut/bin/srun", f"#!/bin/sh\nreal=$(PATH=${{PATH#*:}} command -v srun)\n{cut}\n")
    here = shlex.quote(site.directory("cut/bin"))
    text = f"#!/bin/sh\nexport PATH={here}:$PATH\n{played_nodes.command(site)} --json\n"

    result = site.allocated(["-N4"], site.script("check.sh", text))

    assert result.returncode == 1, result
    healthy = dict.fromkeys(("n1", "n2", "n4"), "healthy")
    assert levels(json.loads(result.stdout)) == {**healthy, "n3": "faulty"}, result.stdout
    site.assert_nothing_left()
