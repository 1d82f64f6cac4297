# SPDX-License-Identifier: Apache-2.0
"""Thousands of nodes in one call: what we say of them is short enough, and Slurm reads it all."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import fold
from tests.lab import Lab
from tests.lab.commands import Result

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(200),
]

NODES = 16_000
# In a cloud, and powered down: slurmctld knows them and talks to none.
SLURM_CONF = f"NodeName=m[00001-{NODES}] CPUs=1 State=CLOUD\nPrivateData=cloud"
# No two of them can be folded to a range.
EVERY_SECOND = [f"m{number:05d}" for number in range(1, NODES, 2)]
DRAIN = """
import os, sys
from slurm_health.system.slurm.client import Client
names = [f"m{number:05d}" for number in range(1, int(sys.argv[1]), 2)]
client = Client(os.environ)
client.drain([*names, *sys.argv[2:]], "slurm-health: too many")
read = client.nodes(names)
print(sum(read[name].drained for name in names))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.start(nodes=1, slurm_conf_extra=SLURM_CONF, deadline_s=100) as lab:
        yield lab


def drained(lab: Lab, *more: str) -> Result:
    argv = [sys.executable, "-c", DRAIN, str(NODES), *more]
    return lab.run(argv, check=False, deadline_s=60)


def test_slurm_reads_the_names_of_eight_thousand_nodes_as_we_write_them(lab: Lab) -> None:
    said = lab.run(["scontrol", "show", "hostnames", fold(EVERY_SECOND)]).stdout
    assert said.split() == EVERY_SECOND
