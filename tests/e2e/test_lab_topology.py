# SPDX-License-Identifier: Apache-2.0
"""A cluster whose leaf switches Slurm knows: the check learns them without asking anybody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import Site
from tests.lab.played_nodes import play, submit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SWITCHES = """\
SwitchName=leaf1 Nodes=n[1-2]
SwitchName=leaf2 Nodes=n[3-4]
SwitchName=spine Switches=leaf[1-2]
"""


@pytest.fixture(scope="module")
def tree() -> Iterator[Site]:
    with Lab.start(nodes=4, topology_conf=SWITCHES) as lab:
        yield Site(lab)


@pytest.mark.heavy
def test_the_leaves_of_the_nodes_are_known_and_rounds_go_inside_and_across_them(tree: Site) -> None:
    play(tree)
    job = submit(tree, "-N4")
    assert tree.ended(job)["JobState"] == "COMPLETED"
    (admitted,) = [r for r in tree.records(job) if r["kind"] == "nodes_admitted"]
    assert admitted["leaves"] == {"leaf1": ["n1", "n2"], "leaf2": ["n3", "n4"]}
    rounds = [r["groups"] for r in tree.records(job) if r["kind"] == "round_started"]
    leaf_of = {node: leaf for leaf, nodes in admitted["leaves"].items() for node in nodes}
    crossing = [[len({leaf_of[n] for n in group}) for group in groups] for groups in rounds]
    assert [2, 2] in crossing
    assert [1, 1] in crossing
    assert expand(tree.ended(job)["NodeList"]) == ("n1", "n2", "n3", "n4")
