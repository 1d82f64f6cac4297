# SPDX-License-Identifier: Apache-2.0
"""Jobs that `squeue` does not show by itself: of a hidden partition, or left out by a variable."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit

pytestmark = pytest.mark.lab

# What users set so that they see of the queue what they want to see of it.
CHOSEN = {
    "SQUEUE_PARTITION": "main",
    "SQUEUE_STATES": "COMPLETED",
    "SQUEUE_USERS": "bob",
    "SQUEUE_NAMES": "none",
    "SQUEUE_FORMAT": "%j",
    "SCANCEL_INTERACTIVE": "1",
    "SCANCEL_STATE": "PENDING",
}
# Prints what it is told by Slurm, of the job in its arguments too.
ASKS = """
import json, os, sys
from slurm_health.system.slurm.client import Client
client, job, uid = Client(os.environ), sys.argv[1], os.getuid()
(state,) = (each.state for each in client.jobs_of(uid) if each.job == job)
print(json.dumps([sorted(client.unended(uid)), client.jobs_named("hidden", uid),
    client.steps_of(job), state, [*client.nodes(["n1", "n2"])]]))
"""


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=2, slurm_conf_extra="PartitionName=hidden Nodes=ALL Hidden=YES") as lab:
        yield Site(lab)


def hidden_job(site: Site, script: str) -> int:
    play(site)
    return submit(site, "-N1", "-wn1", "-phidden", "-Jhidden", "--no-requeue", script=script)


def test_what_is_asked_of_slurm_is_answered_in_full_whatever_it_shows_by_itself(
    site: Site,
) -> None:
    running = hidden_job(site, "srun sleep 600")
    words = ("-N2", "--exclusive", "-phidden", "-Jrival", "--wrap=true")
    rival = int(site.lab.run(["sbatch", "--parsable", *words], user="alice").stdout)

    def told(env: dict[str, str]) -> list[object]:
        argv = [sys.executable, "-c", ASKS, str(running)]
        return list(json.loads(site.lab.run(argv, user="alice", env=env).stdout))

    eventually(site, lambda: told({})[2], "a step of the script")
    steps = told({})[2]
    wanted = [[running, rival], [running], steps, "RUNNING", ["n1", "n2"]]
    site.lab.run(["scontrol", "update", "PartitionName=main", "Hidden=YES"])
    try:
        assert told({}) == wanted
        assert told(CHOSEN) == wanted
    finally:
        site.lab.run(["scontrol", "update", "PartitionName=main", "Hidden=NO"])


def test_a_job_is_cancelled_without_a_question(site: Site) -> None:
    running = hidden_job(site, "sleep 600")
    asks = "import os, sys; from slurm_health.system.slurm.client import Client\n"
    asks += "Client(os.environ).cancel(sys.argv[1])"

    site.lab.run([sys.executable, "-c", asks, str(running)], user="alice", env=CHOSEN)

    assert site.ended(running)["JobState"] == "CANCELLED"
