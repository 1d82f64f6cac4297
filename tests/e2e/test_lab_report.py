# SPDX-License-Identifier: Apache-2.0
"""The report on a real Slurm: the list of one's jobs, somebody else's, what one can hand on."""

from __future__ import annotations

import json

import pytest

from slurm_health.report.export import schema
from tests.lab.installed_site import Site
from tests.lab.played_nodes import FAULTY, play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),
]


def listed(site: Site, user: str = "alice") -> dict[str, dict[str, object]]:
    """Return what `slurm-health report` alone says, by job."""
    import jsonschema  # here, as it takes seconds to load: not in each worker that only collects

    done = site.health("report", "--json", user=user)
    assert done.returncode == 0, done
    found = json.loads(done.stdout)
    jsonschema.Draft202012Validator(schema()).validate(found)
    return {job["job"]: job for job in found["jobs"]}


@pytest.mark.slow
def test_ones_jobs_are_listed_with_what_slurm_says_of_them(site: Site) -> None:
    play(site, n3=FAULTY)
    moved = submit(site, "-N3", "--nodelist=n[1-2]", "--time=5", "--job-name=a name")
    site.ended(moved)
    array = submit(site, "-N1", "--array=1-2", "--time=5")
    waits = site.lab.sbatch("#!/bin/sh\n", "-N1", "--hold", user="alice")
    site.lab.wait_until(lambda: set(site.jobs()), lambda names: len(names) == 1, "one job left")

    found = listed(site)

    assert found[str(moved)]["state"] == "completed"
    assert found[str(array)]["state"] == "2 completed"
    assert str(found[str(array)]["found"]).startswith("2 tasks checked; ")
    assert str(found[str(waits)]["state"]).startswith("pending (JobHeldUser)")
    assert next(iter(found)) == str(waits)
    text = site.health("report").stdout
    assert text.splitlines()[0].split()[:2] == ["JOB", "NAME"]
    site.lab.run(["scancel", str(waits)])


def test_what_became_of_the_jobs_nodes_since_is_told(site: Site) -> None:
    play(site)
    job = submit(site, "-N2", "--nodelist=n[1-2]", "--time=5")
    site.ended(job)
    note = "shealth: gpu 3 lost"
    site.lab.run(["scontrol", "update", "nodename=n2,n5", "state=drain", f"reason={note}"])

    last = site.table(job).split("\n\n")[-1]

    assert last.splitlines()[1].split()[0] == "n2"
    assert f"{note} [root@" in last
    assert "n5" not in last
