# SPDX-License-Identifier: Apache-2.0
"""What doctor says of real Slurms: one set up by the book, and one with every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def lab_with(directory: Path, slurm_conf: str, journal: str = "") -> Iterator[HookedSite]:
    install(directory)
    write_site(directory / "etc", SITE.format(directory=directory, journal=journal))
    extra = slurm_conf.format(directory=directory)
    with Lab.start(nodes=2, slurm_conf_extra=extra, visible=[directory]) as lab:
        yield HookedSite(lab, directory)


def doctor(site: HookedSite) -> dict[str, str]:
    """Return all that doctor says to root on a node, by level."""
    argv = [COMMAND, "doctor", "--config", f"{site.installed}/etc/config.toml", "--json"]
    ran = site.lab.run(argv, node="n1", check=False)
    report = json.loads(ran.stdout)
    assert ran.returncode == (1 if report["counts"]["change"] else 0)
    texts: dict[str, str] = dict.fromkeys(("change", "look", "fine"), "")
    for advice in report["advice"]:
        texts[advice["level"]] += f"{advice['text']} | {advice['do']}\n"
    return texts


@pytest.mark.heavy
def test_a_site_installed_as_documented_needs_no_change(tmp_path: Path) -> None:
    with lab_with(tmp_path, SLURM_CONF) as site:
        texts = doctor(site)
    assert texts["change"] == ""
    for line in ("Prolog=", "Epilog=", "Alloc and DeferBatch", "HealthCheckProgram"):
        assert line in texts["fine"]
    assert "nodes are read through" in texts["fine"]


def test_every_mistake_is_named_with_what_to_do_and_without_slurmctld_the_rest(
    tmp_path: Path,
) -> None:
    (tmp_path / "epilog.d").mkdir()
    with lab_with(tmp_path, MISTAKES, 'journal = "/tmp/journals"') as site:
        texts = doctor(site)
        site.lab.kill_slurmctld()
        without = doctor(site)["change"]
    for text in (
        f"Prolog={tmp_path}/gone is not there",
        f"Epilog={tmp_path}/epilog.d/* is not there",
        "PrologFlags lacks DeferBatch",  # Contain brings Alloc
        "PrologEpilogTimeout=20",
        "journal: /tmp/journals",
    ):
        assert text in texts["change"]
    for text in ("HealthCheckInterval=300", "JobRequeue=1", "nohold_on_prolog_fail"):
        assert text in texts["look"]
    assert "slurm.conf cannot be inspected" in without
    assert "/tmp/journals" in without
