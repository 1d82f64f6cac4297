# SPDX-License-Identifier: Apache-2.0
"""A node with hooks, for the tests beside this file."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.doctor import slurm_conf
from slurm_health.node.doctor.advice import Advice, Urgency
from tests.support.hooked_node import node, rack, shared, slurm, story
from tests.support.hooked_slurm import HookedSlurm
from tests.support.sites import write_site
from tests.support.supervised import write_executable

__all__ = ["node", "rack", "shared", "slurm", "story"]
GOOD = """\
HealthCheckInterval     = 300 sec
HealthCheckNodeState    = ANY
HealthCheckProgram      = {hook}
JobRequeue              = 1
Prolog                  = {hook}
Epilog                  = {hook}
PrologEpilogTimeout     = 600
PrologFlags             = Alloc,DeferBatch
SchedulerParameters     = nohold_on_prolog_fail
UnkillableStepProgram   = {hook}
UnkillableStepTimeout   = 60 sec
MessageTimeout          = 10 sec
"""
SHIM = """\
#!/bin/sh
python={python}
config={config}
slurm={slurm}
limit=50
PATH=$slurm:/usr/sbin
timeout "$limit" "$python" -I -m slurm_health.node.hooks prolog "$config"
"""


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """A shim, and an interpreter that finds its modules in one directory."""
    package = tmp_path / "opt/lib/slurm_health"
    package.mkdir(parents=True)
    (package / "node").mkdir()
    (package / "node/hooks.py").write_text("")
    python = write_executable(tmp_path / "opt/python", f"#!/bin/sh\necho {tmp_path}/opt/lib\n")
    config = write_site(tmp_path / "etc", "[checks.memory]\n")
    slurm = HookedSlurm(tmp_path / "slurm").bin
    text = SHIM.format(python=python, config=config, slurm=slurm)
    return write_executable(tmp_path / "hook", text)


def levels(text: str) -> dict[str, list[str]]:
    return by_level(slurm_conf.advise(slurm_conf.read_config(text), None))


def by_level(advice: list[Advice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {level.value: [] for level in Urgency}
    for each in advice:
        assert bool(each.do) == (each.level is not Urgency.FINE), each
        found[each.level.value].append(f"{each.text} | {each.do}")
    return found
