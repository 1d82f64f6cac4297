# SPDX-License-Identifier: Apache-2.0
"""The light check on a real cluster: it names each fault as the check with torch does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.test_lab_faults import (
    FAULTY,
    Checked,
    assert_named,
    check_nodes,
)
from tests.lab.installed_site import Site, levels, verdict_of

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

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
    assert all(record["figures"]["latency_us"] > 0 for record in exchanged)


@pytest.mark.heavy
def test_a_node_whose_packets_are_dropped_is_faulty(site: Site) -> None:
    site.lab.fault.drop("n3")
    checked = check_nodes(site, 4, check="light")

    assert_named(checked, {"n3": FAULTY})
    assert verdict_of(checked.run, "n3")["component"] == "network"


# --- which probes ------------------------------------------------------------------------------


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
