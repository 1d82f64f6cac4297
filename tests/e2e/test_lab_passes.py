# SPDX-License-Identifier: Apache-2.0
"""Many short jobs on few nodes: a node that root's hooks found well is not checked for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hooks_support import STATE, HookedSite, hooked_site
from tests.lab.installed_site import DEADLINE_S, check_by_default

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

PLACE = f"{STATE}/passes"
COUNT, WORRY = "/tmp/checked", "/tmp/worry"
HOOKS = "passed_min = 30\n"
MORE = f"""
[checks.count]
check = "command"
argv = ["/bin/sh", "-c", "echo checked >>{COUNT}"]
contexts = ["prolog"]
[checks.worry]
check = "file"
path = "{WORRY}"
exists = false
severity = "warn"
contexts = ["healthcheck"]
[default]
min_nodes = 1
min_time_min = 1
passed_min = 30
"""


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    """A cluster with hooks, on which every job is checked by default."""
    directory = tmp_path_factory.mktemp("hooked")
    with hooked_site(directory, nodes=2) as site:
        site.configure(MORE, hooks=HOOKS)
        check_by_default(site, (directory / "etc/config.toml").read_text())
        yield site


def checked(site: HookedSite) -> list[int]:
    """How often each node's prolog has checked it."""
    return [site.on(node, "cat", COUNT).count("checked") for node in site.lab.nodes]


def journals(site: HookedSite) -> set[str]:
    """The jobs of alice that have been checked."""
    return {path.name for path in Path(site.lab.home("alice")).glob(".slurm-health/journal/*/*")}


def run(site: HookedSite, *words: str, script: str = "#!/bin/sh\necho ran\n") -> str:
    job = str(site.lab.sbatch(script, "--exclusive", "--output=%A-%j.out", *words))
    site.lab.wait_until(lambda: not site.job_ids(), bool, "no job is left", DEADLINE_S)
    return job


@pytest.mark.heavy
def test_an_array_has_each_node_checked_once_and_then_again_once_something_is_seen(
    site: HookedSite,
) -> None:
    before = journals(site)
    array = run(site, "-N1", "--array=1-8")
    assert len([*site.lab.home("alice").glob(f"{array}-*.out")]) == 8
    assert checked(site) == [1, 1]
    assert journals(site) == before

    site.on("n1", "touch", WORRY)
    site.health_check("n1")
    run(site, "-N1", "-wn1")
    run(site, "-N1", "-wn2")
    assert checked(site) == [2, 1]
    assert not site.out_of_pool()


@pytest.mark.heavy
def test_no_user_can_say_that_a_node_has_passed(site: HookedSite) -> None:
    forging = f"#!/bin/sh\ncd {PLACE} || exit\nmv passes.json o; rm -f *; echo '[]' >passes.json\n"
    job = run(site, "-N1", "-wn1", script=forging)
    assert site.read(f"{job}-{job}.out").lower().count("permission denied") >= 2
    owners = site.on("n1", "stat", "-c", "%U %a", PLACE, f"{PLACE}/passes.json").split("\n")
    assert owners[:2] == ["root 755", "root 644"]
