# SPDX-License-Identifier: Apache-2.0
"""Training steps find a node behind a slow link, by each command that offers them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.lab_support import COMMAND, DEADLINE_S, Report, Site, levels, verdict_of

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

BAD = {"faulty", "slow"}
NODES = "n[1-4]"
FLAG = "--straggler-detection"


def by_check(site: Site) -> Report:
    result = site.check(["-N4", f"--nodelist={NODES}"], "--json", FLAG)
    found: Report = json.loads(result.stdout)
    return found


def by_sbatch(site: Site) -> Report:
    words = (FLAG, "--on-straggler=report", "--max-requeues=0")
    number = site.submit("-N4", f"--nodelist={NODES}", *words, "--wrap=true")
    site.ended(number)
    return first_run(site, number)


def by_run(site: Site) -> Report:
    site.script("train.py", "print('trained')\n")
    argv = ["srun", "-N4", f"--nodelist={NODES}", COMMAND, "run", FLAG, "--nnodes=4", "train.py"]
    result = site.lab.run(
        argv, user="alice", env={"OMP_NUM_THREADS": "1"}, check=False, deadline_s=2 * DEADLINE_S
    )
    assert "trained" in result.stdout, result
    journals = site.lab.home("alice") / ".slurm-health" / "journal" / "lab"
    return first_run(site, max(int(path.name) for path in journals.iterdir()))


def first_run(site: Site, number: int) -> Report:
    found: Report = site.report(number)["runs"][0]
    return found


@pytest.mark.parametrize("checked", [by_check, by_sbatch, by_run])
def test_a_node_behind_a_slow_link_is_slow_at_communication(
    site: Site, checked: Callable[[Site], Report]
) -> None:
    site.lab.fault.slow_link("n3", mbit=50)

    run = checked(site)

    assert {node for node, level in levels(run).items() if level in BAD} == {"n3"}, run
    assert verdict_of(run, "n3")["component"] == "network", run
