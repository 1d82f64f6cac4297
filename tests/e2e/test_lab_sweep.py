# SPDX-License-Identifier: Apache-2.0
"""A sweep finds the planted bad node and history names it; partners test one that is accused."""

import json
import sys

import pytest

from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab import Lab
from tests.lab.inside import Result
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import FAKE_WORKER, FAULTY, NEVER_READY, STUCK, play

pytestmark = pytest.mark.lab


def sweep(site: Site, *words: str, user: str = "alice") -> Result:
    played = {"FAKE_WORKER_DIR": site.directory("played", user)}
    return site.health(
        "sweep",
        "--partition=main",
        f"--python={FAKE_WORKER}",
        *words,
        user=user,
        env=played,
    )


def submitted(result: Result, code: int = 0) -> list[int]:
    assert result.returncode == code, result
    return [int(line.split()[0]) for line in result.stdout.splitlines()]


@pytest.mark.heavy
def test_a_sweep_checks_every_node_in_turns_and_the_history_names_the_bad_one(site: Site) -> None:
    bad, turns = site.lab.nodes[4], 0
    while True:
        play(site, **dict.fromkeys(site.lab.nodes, NEVER_READY))
        if not (jobs := submitted(sweep(site))):
            break
        turns += 1
        assert len(jobs) == 1  # three of six nodes at one time
        assert submitted(sweep(site)) == []  # while they are in a check there is no room
        play(site, **{bad: FAULTY})
        site.ended(jobs[0])
        eventually(site, lambda: not site.jobs(), "the end of a check")
        assert turns < 6

    history = json.loads(site.health("history", ",".join(site.lab.nodes), "--json").stdout)
    found = {each["node"]: each["checks"][-1]["level"] for each in history["nodes"]}
    assert found == {node: "faulty" if node == bad else "healthy" for node in site.lab.nodes}
    assert turns == 2


# --- giving way ----------------------------------------------------------------------------------

# As docs/admin/fleet.md has it: a partition over the same nodes that all others preempt.
GIVES_WAY = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=scavenger Nodes=ALL PriorityTier=0 PreemptMode=CANCEL
"""


@pytest.mark.slow
def test_a_sweep_gives_way_to_a_job_and_goes_on_where_it_stopped() -> None:
    with Lab.start(nodes=6, slurm_conf_extra=GIVES_WAY) as lab:
        site = Site(lab)
        play(site, **dict.fromkeys(lab.nodes, STUCK))  # its check takes as long as it is let
        (swept,) = submitted(sweep(site, "--", "--partition=scavenger"))
        site.wait_record(swept, "round_started")
        job = lab.sbatch("#!/bin/sh\nexec hostname", f"-N{len(lab.nodes)}", user="bob")

        assert lab.wait_job(swept, {"PREEMPTED", "CANCELLED"}, 90)["JobState"] == "PREEMPTED"
        assert site.ended(job)["JobState"] == "COMPLETED"
        site.assert_nothing_left()
        bad = lab.nodes[1]
        play(site, **{bad: FAULTY})
        while jobs := submitted(sweep(site, "--", "--partition=scavenger")):
            site.ended(jobs[0])
            eventually(site, lambda: not site.jobs(), "the end of a check")

        history = json.loads(site.health("history", ",".join(lab.nodes), "--json").stdout)
        found = {each["node"]: each["checks"][-1]["level"] for each in history["nodes"]}
        assert found == {node: "faulty" if node == bad else "healthy" for node in lab.nodes}
        (cluster,) = json.loads(site.health("lemons", "--json").stdout)["clusters"]
        assert cluster["nodes"][0]["node"] == bad
        assert site.drained() == {}


# --- an accused node --------------------------------------------------------------------------


SWEEP = f"""\
[sweep]
user = "bob"
python = "{sys.executable}"
check = "allgather"
"""
BAD = "n3"


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


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_accused_node_that_loses_packets_is_checked_with_partners_drained_and_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """No test of one node sees that, one with partners does."""
    with hooked_site(tmp_path_factory.mktemp("hooks"), nodes=5) as site:
        site.configure(SWEEP, share=0.5)
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
