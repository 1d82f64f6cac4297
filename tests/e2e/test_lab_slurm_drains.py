# SPDX-License-Identifier: Apache-2.0
"""Drains that a real Slurm sets by itself: explained, and lifted if their cause is gone."""

from __future__ import annotations

import json

import pytest

from tests.e2e import slurm_drains

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]  # some kinds take two minutes
JOB = 4711


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["prolog", "spool", "rebooted", "gres"], id="quick"),
        pytest.param(["fuse", "frozen", "epilog"], marks=pytest.mark.slow, id="unkillable"),
        pytest.param(["stepd", "silent"], marks=pytest.mark.slow, id="minutes"),
    ],
)
def test_a_drain_is_explained_and_its_node_returns_two_checks_after_its_cause_is_gone(
    names: list[str],
) -> None:
    assert slurm_drains.kinds(["host"], names) == 0


def test_the_owner_of_a_job_that_cost_two_nodes_is_sent_one_message() -> None:
    with slurm_drains.cluster(2) as site:
        home = site.lab.paths.home("alice")
        config = home / ".config/slurm-health.toml"
        write_as_alice = f"mkdir -p {config.parent}; echo 'notify = \"cat >>$HOME/got\"' >{config}"
        site.lab.run(["sh", "-c", write_as_alice], user="alice", node="n1")
        for node in site.lab.nodes:
            site.health_check(node)
            slurm_drains._drained(site, node, JOB)
        for node in site.lab.nodes * 2:
            site.on(node, "sh", "-c", f"touch -d '-2 min' {site.shared}/slurm.json; true")
            site.health_check(node)
        site.lab.wait_until(lambda: (home / "got").exists(), bool, "the message", 60.0)

        (line,) = (home / "got").read_text().splitlines()
        message = json.loads(line)
        assert (message["kind"], message["job"]) == ("nodes", str(JOB))
        assert f"job {JOB} left 2 nodes unusable (n[1-2])" in message["text"]
        shown, _ = slurm_drains.explained(site, "n1")
        assert "alice" in shown
