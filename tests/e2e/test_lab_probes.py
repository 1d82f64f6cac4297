# SPDX-License-Identifier: Apache-2.0
"""Each probe catches its own kind of fault and no other; what cannot be measured is no number."""

from __future__ import annotations

import json
import sys

import pytest

from tests.lab.installed_site import Report, Site, levels, verdict_of
from tests.support import wrong_torch

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

BAD = {"faulty", "slow"}


def checked(site: Site, count: int, *words: str) -> Report:
    names = ",".join(site.lab.nodes[:count])
    result = site.check([f"-N{count}", f"--nodelist={names}"], "--json", *words)
    found: Report = json.loads(result.stdout)
    return found


def on_one_node(site: Site, node: str, python_path: str) -> str:
    """Return an interpreter that looks for modules in `python_path`, on one node only."""
    lines = [
        "#!/bin/sh",
        f"[ $(uname -n) = {node} ] && export PYTHONPATH={python_path}",
        f'exec {sys.executable} "$@"',
    ]
    return site.script("python", "\n".join(lines) + "\n")


@pytest.mark.heavy
def test_a_device_that_calculates_wrongly_is_faulty_and_meets_nobody(site: Site) -> None:
    site.script("wrong/sitecustomize.py", wrong_torch.SITECUSTOMIZE)
    python = on_one_node(site, "n2", site.directory("wrong"))
    run = checked(site, 4, f"--python={python}", "--check=standard")
    assert levels(run)["n2"] == "faulty"
    assert "the processors compute wrong results" in verdict_of(run, "n2")["reason"]
    assert not [n for n, level in levels(run).items() if level in BAD and n != "n2"], run
    assert not [line for line in verdict_of(run, "n2")["evidence"] if " with " in line]


@pytest.mark.slow
def test_a_program_of_the_users_own_names_the_node_it_fails_on(site: Site) -> None:
    program = site.script(
        "scratch.sh",
        "#!/bin/sh\n[ $(uname -n) = n4 ] || exit 0\necho scratch is read-only >&2\nexit 77\n",
    )
    number = site.submit("-N4", f"--check=quick,{program}", "--max-requeues=0", "--wrap=true")
    site.ended(number)
    (run,) = site.report(number)["runs"]
    assert levels(run)["n4"] == "faulty"
    assert "scratch.sh: scratch is read-only" in verdict_of(run, "n4")["reason"]
    assert not [n for n, level in levels(run).items() if level in BAD and n != "n4"], run


@pytest.mark.slow
def test_an_interface_that_one_node_does_not_have_is_said_and_is_not_held_against_it(
    site: Site,
) -> None:
    lines = [
        "#!/bin/sh",
        "[ $(uname -n) = n1 ] && export GLOO_SOCKET_IFNAME=ib7",
        f'exec {sys.executable} "$@"',
    ]
    python = site.script("python", "\n".join(lines) + "\n")
    run = checked(site, 4, f"--python={python}", "--check=quick")
    assert levels(run)["n1"] == "inconclusive"
    assert "GLOO_SOCKET_IFNAME names the interface ib7" in verdict_of(run, "n1")["reason"]
    assert not BAD & set(levels(run).values()), run


@pytest.mark.slow
def test_training_steps_are_taken_by_pairs_of_the_nodes_that_are_left(site: Site) -> None:
    site.lab.fault.drop("n3")
    run = checked(site, 4, "--network-check", "--straggler-detection")
    assert levels(run)["n3"] == "faulty"
    trained = {
        each["node"]
        for each in run["nodes"]
        if any("gpt step" in line and "gpt compute" in line for line in each["evidence"])
    }
    # On a busy machine a healthy node may be in doubt; it trains all the same.
    assert trained <= {"n1", "n2", "n4"}, run
    assert len(trained) >= 2, run
