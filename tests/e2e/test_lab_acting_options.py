# SPDX-License-Identifier: Apache-2.0
"""A job of two nodes that cannot exchange data."""

from __future__ import annotations

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Site
from tests.lab.played_nodes import (
    UNREACHABLE,
    play,
    submit,
)

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]


def restarts(site: Site, job: int) -> tuple[str, str, str]:
    """Wait for the job's end: its state, how often it was requeued, where it ran."""
    record = site.ended(job)
    return record["JobState"], record["Restarts"], record["NodeList"]


@pytest.mark.heavy
def test_a_job_of_two_nodes_that_cannot_exchange_data_gets_another_partner(site: Site) -> None:
    play(site, n2=UNREACHABLE)
    job = submit(site, "-N2", "--nodelist=n1", "--exclude=n[3-4]")
    state, requeues, nodes = restarts(site, job)
    assert (state, requeues, set(expand(nodes)) & {"n1", "n2"}) == ("COMPLETED", "1", {"n1"})
    assert site.drained() == {}
    told = site.table(job)
    assert "n2 cannot exchange data with n1, which can with other nodes: it is the" in told
    assert "tell your administrators about n2" in told
