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
