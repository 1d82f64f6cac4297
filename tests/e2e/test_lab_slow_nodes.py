# SPDX-License-Identifier: Apache-2.0
"""A slow node is left where that costs seconds; otherwise the job runs, and says what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import Lab
from tests.lab.installed_site import Site
from tests.lab.played_nodes import SLOW, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

# Slurm only counts them: any file of a device will do.
GPUS = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
NODES_WITH_GPUS = "GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:2\n"
SLEEPS = "#!/bin/sh\nexec sleep 600\n"
NO_OTHERS = "it would have to wait for 1 other node: none is free"
STAYED = re.compile(r"each step may take up to \d+\.\d times as long \(compute\)")


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster of six nodes with two GPUs each, as far as Slurm can tell."""
    with Lab.start(nodes=6, slurm_conf_extra=NODES_WITH_GPUS, gres_conf=GPUS) as lab:
        lab.run(["scontrol", "update", "NodeName=n[1-4]", "Features=fast,large"])
        lab.run(["scontrol", "update", "NodeName=n6", "Features=fast"])
        yield Site(lab)


def update(site: Site, *words: str) -> None:
    site.lab.run(["scontrol", "update", *words])


def occupy(site: Site, nodes: str, *options: str) -> int:
    """Let another user's job run on some nodes for ten minutes."""
    count = len(expand(nodes))
    words = (f"-N{count}", f"-w{nodes}", "--time=10", *options)
    job = site.lab.sbatch(SLEEPS, *words, user="bob")
    site.lab.wait_job(job, {"RUNNING"})
    return job


def assert_stayed(site: Site, job: int | str, nodes: str, why: str) -> None:
    """The job ran where it was, and said why and what that may cost."""
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), output
    assert ended["NodeList"] == nodes
    assert re.search(why, output), output
    assert STAYED.search(output)
    assert site.drained().keys() <= {"n5", "n6"}


def assert_moved(site: Site, job: int, nodes: int, *, off: str) -> None:
    """The job was requeued once, and ran on so many nodes, none of them of those."""
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
    assert len(expand(ended["NodeList"])) == nodes
    assert not {*expand(ended["NodeList"])} & {*expand(off)}
    assert "continuing with" not in output


# --- where other nodes are free ------------------------------------------------------------------


@pytest.mark.heavy
def test_a_job_on_a_slow_node_moves_to_an_idle_one(site: Site) -> None:
    play(site, n3=SLOW)
    assert_moved(site, submit(site, "-N4", "--time=5"), 4, off="n3")


@pytest.mark.heavy
def test_a_job_moves_where_its_features_and_gpus_are(site: Site) -> None:
    play(site, n3=SLOW)
    occupy(site, "n5", "--gres=gpu:1")
    job = submit(site, "-N4", "--time=5", "-Cfast", "--gres=gpu:2")
    assert_moved(site, job, 4, off="n[3,5]")


# --- where none is -------------------------------------------------------------------------------


def test_nodes_that_are_drained_are_no_place_to_go_to(site: Site) -> None:
    play(site, n3=SLOW)
    update(site, "NodeName=n[5-6]", "State=DRAIN", "Reason=somebody's")
    job = submit(site, "-N4", "--time=5")
    assert_stayed(site, job, "n[1-4]", NO_OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["now", "now+10minutes"])
def test_nodes_that_are_reserved_for_others_are_none_either(site: Site, start: str) -> None:
    play(site, n3=SLOW)
    what = ["reservationname=theirs", f"starttime={start}", "duration=60", "users=bob"]
    site.lab.run(["scontrol", "create", *what, "nodes=n[5-6]"])
    try:
        job = submit(site, "-N4", "--time=30")
        assert_stayed(site, job, "n[1-4]", NO_OTHERS)
    finally:
        site.lab.run(["scontrol", "delete", "reservationname=theirs"])


@pytest.mark.slow
def test_nodes_whose_gpus_are_in_use_are_none(site: Site) -> None:
    play(site, n3=SLOW)
    occupy(site, "n[5-6]", "--gres=gpu:1")
    job = submit(site, "-N4", "--time=5", "--gres=gpu:2")
    assert_stayed(site, job, "n[1-4]", NO_OTHERS)


# --- spares and smaller jobs ---------------------------------------------------------------------
