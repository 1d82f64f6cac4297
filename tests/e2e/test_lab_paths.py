# SPDX-License-Identifier: Apache-2.0
"""A bad path between two nodes: the job leaves one of them where it can, and neither is accused."""

from __future__ import annotations

import pytest

from tests.lab.installed_site import DEADLINE_S, Site
from tests.lab.played_nodes import RAN

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

# Those that are apart below are the second pair of the first round.


def assert_well(site: Site, job: int) -> str:
    """The job completed, and no node was accused or drained; its output."""
    record = site.ended(job)
    output = site.lab.job_output(job)
    assert record["JobState"] == "COMPLETED", output
    assert site.drained() == {}
    accused = [
        node
        for each in site.records(job)
        if each["kind"] == "verdict_reached"
        for node in each["nodes"]
        if node["level"] != "healthy"
    ]
    assert accused == []
    return output


@pytest.mark.slow
def test_a_path_that_is_cut_is_found_and_one_of_its_nodes_is_left(site: Site) -> None:
    site.lab.fault.cut_path("n3", "n4")
    job = site.submit("-N3", "--spares=1", "-x", "n[5-6]", "--wrap", RAN)
    site.lab.wait_job(job, deadline_s=DEADLINE_S)
    output = assert_well(site, job)
    assert "ran on n[1-3]" in output
    assert "the path to n3 fails" in output
