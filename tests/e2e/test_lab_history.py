# SPDX-License-Identifier: Apache-2.0
"""What is known of nodes after jobs of real Slurm, and what may be removed of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import FAULTY, play, submit

pytestmark = pytest.mark.lab


def history(site: Site, node: str) -> dict[str, Any]:
    result = site.health("history", node, "--json")
    assert result.returncode == 0, result
    (found,) = json.loads(result.stdout)["nodes"]
    return dict(found)


@pytest.mark.heavy
def test_history_names_the_planted_bad_node_and_clean_spares_the_job_that_runs(site: Site) -> None:
    bad = site.lab.nodes[1]
    play(site, **{bad: FAULTY})
    ended = submit(site, "--nodes=3")
    site.ended(ended)
    running = submit(site, "--nodes=2", f"--exclude={bad}", script="sleep 600")
    eventually(
        site,
        lambda: site.health("report", str(running)).stdout.count("running for") > 0,
        "the script of a job that runs",
    )

    found = history(site, bad)
    assert [each["job"] for each in found["checks"]] == [str(ended)]
    assert found["checks"][0]["level"] == "faulty"
    assert found["standing"]["level"] == "suspect"  # one job proves nothing

    lemons = site.health("lemons")
    assert lemons.returncode == 0, lemons
    assert [line.split()[:2] for line in lemons.stdout.splitlines() if bad in line[:8]] == [
        [bad, "suspect"]
    ]

    cleaned = site.health("clean", "--older-than=0h", "--yes")

    assert cleaned.returncode == 0, cleaned
    assert f"its job has not ended: job {running}" in cleaned.stderr
    assert site.health("report", str(running)).returncode == 0
    assert site.health("report", str(ended)).returncode == 4
    assert site.health("history", bad).returncode == 2  # its only check went with the journal
