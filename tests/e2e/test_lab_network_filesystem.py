# SPDX-License-Identifier: Apache-2.0
"""Journal or ledger on a network filesystem: caches on every node, a hang, many at once."""

import json
from collections.abc import Iterator

import pytest

from slurm_health.preflight.supervisor.check_process import SILENCE_S
from slurm_health.system import journal
from tests.e2e.hooks_support import FLAG, hooked_site
from tests.e2e.test_lab_storage import hung_client
from tests.lab import Lab
from tests.lab.installed_site import DEADLINE_S, Report, Site, accused, eventually, levels
from tests.lab.played_nodes import FAULTY, NEVER_READY, play, submit

pytestmark = [
    pytest.mark.lab(network_filesystem=True),
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

BAD = "n3"
SIZE_MB = 16


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster each of whose nodes has its own client of one small volume."""
    with Lab.start(nodes=6, network_filesystem_mb=SIZE_MB) as lab:
        lab.run(["install", "-d", "-o", "alice", "-g", "alice", f"{lab.paths.shared}/alice"])
        yield Site(lab)


def start(site: Site, *words: str, **behaviours: str) -> int:
    play(site, **behaviours)
    return submit(site, "-N4", f"--journal={site.lab.paths.shared}/alice", *words)


def report(site: Site, job: int) -> Report:
    """What `slurm-health report --json` says, read through the login node's own client."""
    where = f"--journal={site.lab.paths.shared}/alice"
    ran = site.health("report", "--json", where, str(job))
    assert ran.returncode == 0, ran
    found: Report = json.loads(ran.stdout)
    return found


def test_a_job_leaves_a_bad_node_although_every_node_caches(site: Site) -> None:
    job = start(site, **{BAD: FAULTY})
    assert site.ended(job)["JobState"] == "COMPLETED"
    assert site.lab.job(job)["ExcNodeList"] == BAD
    first, second = report(site, job)["runs"]
    assert accused(first) == {BAD: "faulty"}
    assert accused(second) == {}
    assert site.lab.job_output(job).splitlines()[-1].startswith("attempt 1 ran on ")


def test_a_node_whose_mount_hangs_is_not_accused_and_holds_nobody_up(site: Site) -> None:
    with hung_client(site.lab, BAD):
        job = start(site)
        assert site.ended(job)["JobState"] == "COMPLETED"
    (run,) = report(site, job)["runs"]
    assert levels(run)[BAD] == "inconclusive"
    assert accused(run) == {}
    assert site.drained() == {}


@pytest.mark.timeout(600)
def test_a_hang_on_the_batch_host_in_the_middle_of_a_check_lets_the_script_run_unchecked(
    site: Site,
) -> None:
    job = start(site, "-wn1", n2=NEVER_READY)
    path = f"{site.lab.paths.shared}/alice/lab/{job}/0/n2.jsonl"

    def began() -> bool:
        return "agent_started" in site.lab.run(["cat", path], check=False).stdout

    eventually(site, began, "agents", DEADLINE_S)
    with hung_client(site.lab, "n1"):
        waited_s = SILENCE_S + journal.ANSWER_LIMIT_S + DEADLINE_S
        eventually(site, lambda: "ran on" in site.lab.job_output(job), "the script", waited_s)
    assert site.ended(job)["JobState"] == "COMPLETED"
    said = site.lab.job_output(job)
    assert f"start 1 of 2 of the check: it hangs: no output for {SILENCE_S:g} s" in said
    assert "its filesystem did not answer within 60 s" in said
    assert "ran on n[1-4]" in said
    site.assert_nothing_left()
    assert site.drained() == {}


@pytest.mark.timeout(3600)  # a mass failure takes some 10 s, on a machine that is busy 40
def test_in_fifty_mass_failures_no_more_nodes_are_drained_than_the_breaker_allows(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    drained = []
    directory = tmp_path_factory.mktemp("hooks")
    with hooked_site(directory, nodes=6, volume_mb=SIZE_MB) as site:
        for _ in range(50):
            site.configure(share=0.5)
            for node in site.lab.nodes:
                site.on(node, "touch", FLAG)
            site.health_checks()
            drained.append(len(site.out_of_pool()))
            site.lab.reset()
    assert set(drained) <= {1, 2, 3}, drained
