# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check` inside an allocation, by itself: its table, its JSON and its exit codes."""

from __future__ import annotations

import json

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import Site, levels

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]


@pytest.mark.heavy
def test_healthy_nodes_are_a_table_and_code_0(site: Site) -> None:
    result = site.check(["-N2"])
    assert result.returncode == 0, result
    assert "n[1-2]" in result.stdout
    assert "healthy" in result.stdout
    site.assert_nothing_left()


@pytest.mark.heavy
def test_a_bad_node_is_code_1_and_stays_the_users_to_deal_with(site: Site) -> None:
    site.lab.fault.drop("n3")
    site.forget_calls()
    result = site.check(["-N4"], "--json", user="root")
    assert result.returncode == 1, result
    assert levels(json.loads(result.stdout))["n3"] == "faulty"
    # Without --act it only looks, root or not.
    assert site.drained() == {}
    assert not {name for name in site.calls() if "UPDATE" in name or "REQUEUE" in name}


@pytest.mark.parametrize(("act", "code"), [(False, 3), (True, 0)])
def test_nodes_that_cannot_be_measured_are_code_3_and_with_act_the_script_may_go_on(
    site: Site, act: bool, code: int
) -> None:
    words = ("--act",) * act
    result = site.check(["-N1"], *words, "--json", "--python=/usr/bin/false")
    assert result.returncode == code, result
    run = json.loads(result.stdout)
    assert (levels(run), run["exit_code"]) == ({"n1": "inconclusive"}, 3)


def test_a_line_in_anyones_own_batch_script_checks_and_lets_the_script_decide(site: Site) -> None:
    played_nodes.play(site)
    text = f"#!/bin/sh\n{played_nodes.command(site)} || exit\necho training\n"
    number = site.lab.sbatch(text, "-N2")
    site.lab.wait_job(number)
    output = site.lab.job_output(number)
    assert "healthy" in output
    assert output.splitlines()[-1] == "training"
    assert site.report(number)["runs"][0]["exit_code"] == 0
