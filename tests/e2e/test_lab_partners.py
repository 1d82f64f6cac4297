# SPDX-License-Identifier: Apache-2.0
"""An accused node that loses packets: no test of one node sees that, one with partners does."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab.installed_site import eventually

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1200)]

SWEEP = f"""\
[sweep]
user = "bob"
python = "{sys.executable}"
check = "allgather"
"""
BAD = "n3"


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    with hooked_site(tmp_path_factory.mktemp("hooks"), nodes=5) as site:
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    # The lab's nodes share process numbers: the epilog of one may see those of another's job.
    more = SWEEP
    module_site.configure(more, share=0.5)
    yield module_site
    module_site.lab.reset()
    module_site.configure()


def all_over(site: HookedSite) -> None:
    """Wait until no job waits or runs, and no epilog does."""
    eventually(site, lambda: not site.jobs(), "an empty queue", 300)
    states = site.lab.node_states
    eventually(
        site,
        lambda: not any("COMPLETING" in each["State"] for each in states().values()),
        "the epilogs",
        120,
    )


def test_an_accused_node_that_loses_packets_is_checked_with_partners_drained_and_comes_back(
    site: HookedSite,
) -> None:
    script = site.script("train.sh", "#!/bin/sh\nhostname\n")
    site.lab.fault.drop(BAD)
    for _ in range(4):  # on a busy machine a check may not be sure
        job = site.submit("-N4", "--max-requeues=0", "--check=allgather", script)
        site.ended(job, 300)
        all_over(site)
        if site.out_of_pool():
            break

    assert list(site.out_of_pool()) == [BAD], site.hook_log(BAD)
    assert "check=sweep job=" in site.out_of_pool()[BAD]
    log = site.hook_log(BAD)
    assert log.index("accuses this node: network") < log.index("drained: shealth: network")

    site.lab.fault.clear(BAD)
    config = str(site.installed / "etc/config.toml")
    released = site.health("nodes", "--config", config, "release", BAD, user="root")
    assert released.returncode == 0, released
    job = site.submit("-N5", "--check=allgather", script)
    assert site.ended(job, 300)["JobState"] == "COMPLETED"
    assert site.out_of_pool() == {}
