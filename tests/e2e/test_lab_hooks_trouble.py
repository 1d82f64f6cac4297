# SPDX-License-Identifier: Apache-2.0
"""The hooks when Slurm, the disk or time are against them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.hooks_support import FLAG, HookedSite, hooked_site

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    with hooked_site(tmp_path_factory.mktemp("hooks"), nodes=4) as site:
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    module_site.configure(share=0.5)
    yield module_site
    module_site.lab.reset()
    module_site.configure()


@pytest.mark.heavy
def test_with_slurmctld_slower_than_a_hook_waits_nothing_is_drained(site: HookedSite) -> None:
    """Stopped, it takes connections and does not answer: the worst kind of slow."""
    site.on("n2", "touch", FLAG)
    pids = site.lab.slurmctld_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        site.health_check("n2")
        assert time.monotonic() - began < 31
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert "could not query Slurm" in site.hook_log("n2")
    assert site.out_of_pool() == {}
    site.health_check("n2")
    assert list(site.out_of_pool()) == ["n2"]


def test_a_rack_that_fails_in_the_same_moment_is_not_drained(site: HookedSite) -> None:
    """Every node's hook runs at once, so that they meet at the lock."""
    for node in site.lab.nodes:
        site.on(node, "touch", FLAG)
    running = [
        site.lab.popen(
            [str(site.installed / "healthcheck")], node=node, env={"SLURMD_NODENAME": node}
        )
        for node in site.lab.nodes
    ]
    for process in running:
        assert process.wait(60) == 0
    assert 1 <= len(site.out_of_pool()) <= 2  # half of four nodes may be drained


RESERVED = ["starttime=now", "duration=60", "user=root", "nodes=n3"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("change", "undo", "state"),
    [
        (["update", "NodeName=n3", "State=DOWN", "Reason=theirs"], [], "DOWN"),
        (["update", "NodeName=n3", "State=FAIL", "Reason=theirs"], [], "FAIL"),
        (["update", "NodeName=n3", "State=DRAIN", "Reason=theirs"], [], "DRAIN"),
        (
            ["create", "ReservationName=m", "flags=maint,ignore_jobs", *RESERVED],
            ["delete", "ReservationName=m"],
            "MAINT",
        ),
        (["reboot", "nextstate=resume", "reason=theirs", "n3"], ["cancel_reboot", "n3"], "REBOOT"),
    ],
    ids=["down", "fail", "drain", "maintenance", "reboot"],
)
def test_a_node_in_the_hands_of_others_is_left_as_it_is(
    site: HookedSite, change: list[str], undo: list[str], state: str
) -> None:
    """Real Slurm's own words for each state; a job on the node keeps drain and reboot waiting."""
    if state in {"DRAIN", "REBOOT"}:
        job = site.lab.sbatch("#!/bin/sh\necho begun\nsleep 300\n", "-wn3")
        # Slurm calls it running while the prolog still is.
        site.lab.wait_until(lambda: site.lab.job_output(job), bool, f"job {job} past its prolog")
    site.lab.run(["scontrol", *change])
    try:
        before = site.lab.wait_until(
            lambda: site.lab.node_state("n3"), lambda seen: state in seen["State"], state
        )
        site.on("n3", "touch", FLAG)
        site.health_check("n3")
        after = site.lab.node_state("n3")
        same = ("State", "Reason")
        assert [after.get(key) for key in same] == [before.get(key) for key in same]
        for _ in range(4):
            site.on("n3", "rm", "-f", FLAG)
            site.health_check("n3")
        assert site.lab.node_state("n3").get("Reason") == before.get("Reason")
    finally:
        if undo:
            site.lab.run(["scontrol", *undo], check=False)
        site.lab.run(["scontrol", "update", "NodeName=n3", "State=RESUME"], check=False)
