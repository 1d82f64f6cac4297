# SPDX-License-Identifier: Apache-2.0
"""A user's finding and root's own measurement: both of a real fault, or no drain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.hooks_support import HookedSite, hooked_site

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(900)]

# What init config writes on a quiet node; a figure that any processor reaches, because here
# other work on the machine may take its share and must not decide.
MEASURED = "[checks.cpu-speed]\nmin_rounds_per_s = 1000\ntime_limit_s = 30\n"


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    with hooked_site(tmp_path_factory.mktemp("hooks"), nodes=4) as site:
        if site.lab.cpu_controller is None:
            pytest.skip("no cpu cgroup controller: a processor cannot be starved here")
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    more = MEASURED
    module_site.configure(more, share=0.5)
    yield module_site
    module_site.lab.reset()
    module_site.configure()


@pytest.mark.torch
def test_a_starved_node_is_found_by_a_users_job_measured_by_root_and_drained(
    site: HookedSite,
) -> None:
    """No flag tells anybody: the job's check measures it, and the epilog measures it again."""
    script = site.script("train.sh", "#!/bin/sh\nhostname\n")
    jobs: list[int] = []
    while not site.out_of_pool() and len(jobs) < 4:  # on a busy machine a check may not be sure
        jobs.append(site.submit("-N4", "--max-requeues=0", script))
        site.wait_record(jobs[-1], "nodes_admitted")
        site.lab.fault.starve_cpu("n3", share=0.03)
        site.ended(jobs[-1], deadline_s=300)
        site.lab.wait_until(
            lambda: site.lab.node_state("n3")["State"],
            lambda state: "COMPLETING" not in state,
            "the epilog on n3",
            120,
        )
        site.lab.fault.clear("n3")
    assert list(site.out_of_pool()) == ["n3"]
    assert f"check=cpu-speed job={jobs[-1]} " in site.out_of_pool()["n3"]
    assert "held back by a CPU quota" in site.out_of_pool()["n3"]
    assert "this node" in site.hook_log("n3")


@pytest.mark.parametrize("component", ["compute", "node"])
def test_a_healthy_node_that_a_forged_journal_accuses_is_measured_and_stays(
    site: HookedSite, component: str
) -> None:
    """The node of a job beside a starved one: root's measurement decides, not the words."""
    site.lab.fault.starve_cpu("n3", share=0.2)
    for _ in range(3):
        site.accuse("n2", component=component)
    assert site.out_of_pool() == {}
    log = site.hook_log("n2")
    assert f"accuses this node: {component}: allgather failed" in log
    assert "not confirmed" in log
    assert "cpu-speed" in log
