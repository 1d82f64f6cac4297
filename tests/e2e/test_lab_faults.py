# SPDX-License-Identifier: Apache-2.0
"""Each fault of the lab, met by a check: the right node is named, and no other ever is.

What a fault leads to follows from the rules of the design: a node that fails or slows others is
faulty or slow, one that cannot be measured is inconclusive, trouble that passes is neither."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.installed_site import COMMAND, DEADLINE_S, Report, Site, levels, verdict_of

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

HEALTHY = frozenset({"healthy"})
FAULTY = frozenset({"faulty"})
BAD = frozenset({"faulty", "slow"})
# Slurm or the node itself keeps it from being measured; whether that is its fault may be open.
NAMED = frozenset({"faulty", "inconclusive"})


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A check: its exit code, its report, what it said meanwhile."""

    code: int
    run: Report
    said: str


def nothing(job: str) -> None:
    """Do nothing more once the check has begun."""


def check_nodes(
    site: Site, count: int, meanwhile: Callable[[str], None] = nothing, *, check: str = "auto"
) -> Checked:
    """Check the first nodes as alice; `meanwhile` is called with the job once it has begun."""
    names = ",".join(site.lab.nodes[:count])
    words = [COMMAND, "check", "--json", f"--check={check}"]
    argv = ["salloc", f"-N{count}", f"--nodelist={names}", *words]
    process = site.lab.popen(argv, user="alice", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        try:
            job = site.lab.wait_until(site.job_ids, bool, "an allocation")[0]
            site.wait_record(job, "agents_launched")
            meanwhile(job)
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    return Checked(code=process.returncode, run=json.loads(stdout), said=stderr.decode())


def once_measured(site: Site, act: Callable[[], None]) -> Callable[[str], None]:
    """Return what breaks something only when every node has shown that it can be measured."""

    def meanwhile(job: str) -> None:
        site.wait_record(job, "nodes_admitted")
        act()

    return meanwhile


def assert_named(checked: Checked, allowed: Mapping[str, frozenset[str]]) -> None:
    """The broken nodes are what they may be called, with a reason; no other is called bad."""
    found = levels(checked.run)
    for node, names in allowed.items():
        assert found[node] in names, checked
        assert verdict_of(checked.run, node)["reason"]
    others = {node: level for node, level in found.items() if node not in allowed}
    assert not [node for node, level in others.items() if level in BAD], checked
    if any(found[node] in BAD for node in allowed):
        assert checked.code == 1
    elif "inconclusive" in found.values():
        assert checked.code == 3


@pytest.mark.slow
def test_of_three_nodes_the_one_whose_packets_are_dropped_is_known_without_a_deadline(
    site: Site,
) -> None:
    site.lab.fault.drop("n3")
    jobs: list[str] = []
    checked = check_nodes(site, 3, jobs.append)

    assert_named(checked, {"n3": FAULTY})
    written = site.records(jobs[0])
    phases = [record["phase"] for record in written if record["kind"] == "round_started"]
    # Alone they need one round, and as pairs three: one for each pair.
    assert phases[:4] == ["solo", "pair", "pair", "pair"]
    stopped = [record for record in written if record["kind"] == "group_aborted"]
    assert [record for record in stopped if "no answer from" in record["reason"]]
    assert not [record for record in stopped if record.get("timed_out")]


@pytest.mark.slow
def test_a_node_with_a_slow_link_is_found(site: Site) -> None:
    site.lab.fault.slow_link("n3", mbit=50)
    checked = check_nodes(site, 4)
    assert_named(checked, {"n3": BAD})
    assert "allgather" in verdict_of(checked.run, "n3")["reason"]


@pytest.mark.slow
def test_nodes_on_which_slurm_cannot_start_a_step_are_named(site: Site) -> None:
    site.lab.fault.kill_slurmd("n3")
    site.lab.fault.drop("n5", everything=True)
    checked = check_nodes(site, 6)
    assert_named(checked, {"n3": NAMED, "n5": NAMED})


@pytest.mark.slow
def test_nodes_whose_agent_or_workers_never_live_are_named(site: Site) -> None:
    site.lab.fault.kill_agent("n2", times=None)
    site.lab.fault.crash_worker("n3")
    site.lab.fault.hang_worker("n4")
    checked = check_nodes(site, 6)
    assert_named(checked, {"n2": NAMED, "n3": NAMED, "n4": NAMED})
    for node, fault in (("n2", "kill-agent"), ("n3", "crash-worker"), ("n4", "hang-worker")):
        assert {*site.lab.fault.victims(node)} == {fault}


@pytest.mark.slow
def test_an_agent_and_a_worker_that_die_once_come_back_and_nobody_is_blamed(site: Site) -> None:
    site.lab.fault.kill_agent("n2", times=1)
    crash = once_measured(site, lambda: site.lab.fault.crash_worker("n4", times=1))
    before = len(site.lab.fault.victims("n2"))
    checked = check_nodes(site, 5, crash)
    assert_named(checked, {"n2": HEALTHY, "n4": HEALTHY | frozenset({"inconclusive"})})
    assert len(site.lab.fault.victims("n2")) == before + 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["crash_worker", "hang_worker"])
def test_a_worker_that_crashes_or_hangs_in_every_round_makes_its_node_known(
    site: Site, fault: str
) -> None:
    checked = check_nodes(
        site, 4, once_measured(site, lambda: getattr(site.lab.fault, fault)("n3"))
    )
    assert_named(checked, {"n3": NAMED})
    # Killed by its agent, although it was stopped.
    site.assert_nothing_left()


# --- light probes ---------------------------------------------------------------------------------


UNSEEN = "processors, memory and the network over TCP were tested, NCCL was not"


def test_no_well_node_is_accused_and_the_report_says_what_was_not_seen(site: Site) -> None:
    jobs: list[str] = []
    checked = check_nodes(site, 4, jobs.append, check="light")

    # On a machine with much else to do, a check may doubt a node; it never blames one.
    doubtful = [node for node, level in levels(checked.run).items() if level == "inconclusive"]
    assert set(levels(checked.run).values()) <= {"healthy", "inconclusive"}, checked
    assert checked.code == (3 if doubtful else 0)
    assert checked.run["unseen"] == f"light probes (--check=light): {UNSEEN}"
    assert all(node["figures"]["allgather_gb_per_s"] for node in checked.run["nodes"])
    assert all(node["figures"]["matmul_gflop_per_s"] for node in checked.run["nodes"])
    # Data goes over the network of the job.
    ready = site.records(jobs[0], writer="n1")
    (said,) = (record for record in ready if record["kind"] == "workers_ready")
    assert said["backend"] == "tcp"
    exchanged = [record for record in ready if record.get("probe") == "allgather"]
    assert {record["figures"]["transport"] for record in exchanged} == {said["interface"]}


@pytest.mark.heavy
def test_a_node_whose_packets_are_dropped_is_faulty(site: Site) -> None:
    site.lab.fault.drop("n3")
    checked = check_nodes(site, 4, check="light")

    assert_named(checked, {"n3": FAULTY})
    assert verdict_of(checked.run, "n3")["component"] == "network"


def without_torch(site: Site) -> str:
    """An interpreter that finds no torch, on every node."""
    base = Path(sys.executable).resolve()
    return site.script("bare-python", f'#!/bin/sh\nexec {base} -I -S "$@"\n')


@pytest.mark.slow
def test_where_one_node_lacks_torch_light_probes_measure_all_and_nobody_is_blamed(
    site: Site,
) -> None:
    bare = without_torch(site)
    mixed = site.script(
        "mixed-python",
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n3 ] && exec {bare} "$@"\nexec {sys.executable} "$@"\n',
    )
    result = site.check(["-N4", "--nodelist=n[1-4]"], f"--python={mixed}", "--json")
    checked = Checked(code=result.returncode, run=json.loads(result.stdout), said=result.stderr)

    # On a machine that is busy enough, what one of them has measured may be doubted.
    assert_named(checked, {})
    assert checked.run["unseen"].startswith("light probes (n3: ")
    assert all(node["figures"]["allgather_gb_per_s"] for node in checked.run["nodes"])
