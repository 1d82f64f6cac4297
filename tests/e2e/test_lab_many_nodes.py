# SPDX-License-Identifier: Apache-2.0
"""A check of as many nodes as this machine holds, on some of which no step can be launched."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab import Lab, played_nodes
from tests.lab.installed_site import Site, levels

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

NODES = 24


@pytest.fixture
def site() -> Iterator[Site]:
    """A cluster of many small nodes, for one test: a slurmd that was stopped leaves jobs behind."""
    with Lab.start(nodes=NODES, deadline_s=180) as lab:
        yield Site(lab)


@pytest.mark.slow
def test_three_nodes_without_a_working_slurmd_cost_neither_the_check_nor_the_others(
    site: Site,
) -> None:
    played_nodes.play(site)
    site.lab.fault.kill_slurmd("n3")
    site.lab.fault.kill_slurmd("n9")
    site.lab.fault.stop_slurmd("n13")
    text = f"#!/bin/sh\n{played_nodes.command(site)} --json\n"
    result = site.allocated([f"-N{NODES}"], site.script("check.sh", text))

    found = levels(json.loads(result.stdout))
    # srun gives up on them, and ends the step on all others, at its message timeout: whether they
    # are tried again before the others are judged depends on how quick those are.
    for node in ("n3", "n9", "n13"):
        assert found.pop(node) in {"faulty", "inconclusive"}, result
    # A stopped slurmd may be the one that passes a launch on to others: nobody blames those.
    assert set(found.values()) <= {"healthy", "inconclusive"}, result
    assert len(found) == NODES - 3
    assert list(found.values()).count("healthy") > NODES / 2, result
