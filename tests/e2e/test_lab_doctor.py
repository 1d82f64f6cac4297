# SPDX-License-Identifier: Apache-2.0
"""doctor on a real cluster: a site as it should be, and mistakes made on purpose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hooks_support import SLURM_CONF, HookedSite, install
from tests.lab import Lab
from tests.lab.installed_site import COMMAND
from tests.support.sites import write_site

pytestmark = [pytest.mark.lab, pytest.mark.timeout(200)]

# Every one of these fails jobs, or leaves nodes unchecked, and Slurm itself says nothing of it.
MISTAKES = """\
Prolog={directory}/gone
Epilog={directory}/epilog.d/*
HealthCheckProgram={directory}/healthcheck
HealthCheckInterval=0
PrologFlags=Contain
PrologEpilogTimeout=20
JobRequeue=0
"""
SITE = """\
{journal}
[hooks]
state = "/tmp/slurm-health-state"
[breaker]
directory = "{directory}/shared"
[checks.memory]
"""


class Consulted(HookedSite):
    """A cluster and what doctor says of it."""

    def doctor(self, user: str = "root", node: str | None = "n1") -> dict[str, Any]:
        """Return what it says, for a program."""
        ran = self.lab.run(
            [COMMAND, "doctor", "--config", f"{self.installed}/etc/config.toml", "--json"],
            user=user,
            node=node,
            check=False,
        )
        assert ran.returncode in {0, 1}, ran
        found: dict[str, Any] = json.loads(ran.stdout)
        assert (ran.returncode == 1) == (found["counts"]["change"] > 0)
        return found

    def told(self, level: str, user: str = "root") -> str:
        """Return all it says at a level."""
        advice = self.doctor(user)["advice"]
        return "\n".join(f"{e['text']} | {e['do']}" for e in advice if e["level"] == level)


def lab_with(directory: Path, slurm_conf: str, journal: str = "") -> Iterator[Consulted]:
    install(directory)
    write_site(directory / "etc", SITE.format(directory=directory, journal=journal))
    extra = slurm_conf.format(directory=directory)
    with Lab.start(nodes=2, slurm_conf_extra=extra, visible=[directory]) as lab:
        yield Consulted(lab, directory)


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consulted]:
    """The hooks as the documentation says."""
    yield from lab_with(tmp_path_factory.mktemp("hooks"), SLURM_CONF)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consulted]:
    """The same with mistakes."""
    directory = tmp_path_factory.mktemp("hooks")
    (directory / "epilog.d").mkdir()
    yield from lab_with(directory, MISTAKES, 'journal = "/tmp/journals"')


@pytest.mark.heavy
def test_a_site_installed_as_documented_needs_no_change(well: Consulted) -> None:
    report = well.doctor()
    assert report["counts"]["change"] == 0, report
    told = well.told("fine")
    for line in ("Prolog=", "Epilog=", "Alloc and DeferBatch", "HealthCheckProgram"):
        assert line in told
    assert "nodes are read through" in told


def test_every_mistake_is_named_with_what_to_do(wrong: Consulted) -> None:
    change, look = wrong.told("change"), wrong.told("look")
    assert f"Prolog={wrong.installed}/gone is not there" in change
    assert f"Epilog={wrong.installed}/epilog.d/* is not there" in change
    assert "PrologFlags lacks DeferBatch" in change  # Contain brings Alloc
    assert "PrologEpilogTimeout=20" in change
    assert "journal: /tmp/journals" in change
    assert "HealthCheckInterval=300" in look
    assert "JobRequeue=1" in look
    assert "nohold_on_prolog_fail" in look


@pytest.mark.heavy
def test_with_slurmctld_away_the_rest_is_said_all_the_same(wrong: Consulted) -> None:
    wrong.lab.kill_slurmctld()
    try:
        change = wrong.told("change")
    finally:
        wrong.lab.start_slurmctld()
    assert "slurm.conf cannot be inspected" in change
    assert "/tmp/journals" in change
