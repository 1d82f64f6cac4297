# SPDX-License-Identifier: Apache-2.0
"""What is known of nodes after jobs of real Slurm, and what may be removed of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import FAULTY, STUCK, play, submit

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


@pytest.mark.slow
def test_what_history_says_of_a_node_is_the_prior_of_the_next_check_and_no_verdict(
    site: Site,
) -> None:
    bad = site.lab.nodes[2]
    config = site.script("site.toml", f'standings = "{site.lab.home("alice")}/standings.json"\n')
    env = {"SLURM_HEALTH_CONFIG": config}
    play(site, **{bad: FAULTY})
    site.ended(submit(site, "--nodes=4"))

    published = site.health("lemons", "--publish", env=env)

    assert published.returncode == 0, published
    play(site)  # it is well again
    job = submit(site, "--nodes=4", env=env)
    site.ended(job)
    assert began(site, job)["prior"] == {bad: 0.1}
    assert {node["level"] for node in site.report(job)["nodes"]} == {"healthy"}

    site.script("standings.json", "{")
    job = submit(site, "--nodes=4", env=env)
    site.ended(job)

    said = site.read(f"slurm-{job}.out")
    assert "the history of nodes is not taken into account" in said, said
    assert began(site, job).get("prior", {}) == {}
    assert site.report(job)["runs"][-1]["disposition"] == "proceed"


def began(site: Site, job: int) -> dict[str, Any]:
    """The first record of a job's check."""
    journal = site.lab.home("alice") / ".slurm-health" / "journal" / "lab" / str(job) / "0"
    return dict(json.loads((journal / "master.jsonl").read_text().splitlines()[0]))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cancelling_checks_speaks_against_no_node(site: Site) -> None:
    play(site, **dict.fromkeys(site.lab.nodes, STUCK))
    last = []
    for _ in range(6):
        number = submit(site, f"--nodes={len(site.lab.nodes)}")
        site.wait_record(number, "round_started")
        site.lab.run(["scancel", str(number)], user="alice")
        site.ended(number)
        kinds = [record["kind"] for record in site.records(number)]
        assert "agents_lost" not in kinds
        last.append(kinds[-1])
    # Not each time on a busy machine, where a job is killed 5 s after it is told to end.
    assert "master_stopped" in last

    assert {tuple(each["signals"]) for each in history(site, site.lab.nodes[-1])["checks"]} == {()}
