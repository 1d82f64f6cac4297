# SPDX-License-Identifier: Apache-2.0
"""The hooks under a real slurmd and slurmctld: what Slurm says afterwards."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hooks_support import FLAG, HIDDEN, HookedSite, hooked_site, install
from tests.lab import Lab
from tests.lab.installed_site import COMMAND
from tests.support.rows import rows
from tests.support.sites import write_site

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

JOB = "#!/bin/sh\nhostname\n"
# Calls that only somebody who asks about nodes, or changes them, makes.
ASKING = ("NODE_INFO", "UPDATE_NODE", "PARTITION_INFO", "BUILD_INFO", "PING", "JOB_USER_INFO")


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    with hooked_site(tmp_path_factory.mktemp("hooks"), nodes=5) as site:
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    module_site.configure()
    yield module_site
    module_site.configure()
    module_site.lab.reset()


def test_a_prolog_that_finds_a_fault_drains_and_the_job_runs_elsewhere(site: HookedSite) -> None:
    site.on("n1", "touch", FLAG)
    site.forget_calls()
    job = site.lab.sbatch(JOB, "-N1")

    def hurried() -> dict[str, str]:
        # Slurm waits two minutes after a requeue; the test does not.
        site.lab.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        return site.lab.job(job)

    site.lab.wait_until(hurried, lambda seen: seen["JobState"] == "COMPLETED", "the job", 60)
    assert site.lab.job(job)["Restarts"] == "1"
    assert site.lab.job_output(job).strip() != "n1"
    (reason,) = site.out_of_pool().values()
    assert reason.startswith("shealth: ")
    assert f" check=flag job={job} t=" in reason
    assert f"{FLAG} exists" in reason
    # The count that a well node keeps at nothing does count.
    asked = [name for name in site.calls().elements() if any(word in name for word in ASKING)]
    assert len(asked) >= 3


def test_a_user_without_rights_gets_a_truly_bad_node_drained(site: HookedSite) -> None:
    site.on("n3", "touch", HIDDEN)
    job = site.accuse("n3")
    reason = site.out_of_pool()["n3"]
    assert reason.startswith("shealth: ")
    assert f" check=deep job={job} t=" in reason


# --- when Slurm is slow, or others hold the node --------------------------------------------------


@pytest.mark.heavy
def test_with_slurmctld_slower_than_a_hook_waits_nothing_is_drained(site: HookedSite) -> None:
    """Stopped, it takes connections and does not answer: the worst kind of slow."""
    site.on("n2", "touch", FLAG)
    pids = site.lab.slurmctld_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        site.health_check("n2")
        assert time.monotonic() - began < 31
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert "could not query Slurm" in site.hook_log("n2")
    assert site.out_of_pool() == {}
    site.health_check("n2")
    assert list(site.out_of_pool()) == ["n2"]


@pytest.mark.heavy
@rows
def test_a_node_in_the_hands_of_others_is_left_as_it_is(
    site: HookedSite, change: list[str], undo: list[str], state: str
) -> None:
    """Real Slurm's own words for each state; a job on the node keeps drain and reboot waiting."""
    if state in {"DRAIN", "REBOOT"}:
        job = site.lab.sbatch("#!/bin/sh\necho begun\nsleep 300\n", "-wn3")
        # Slurm calls it running while the prolog still is.
        site.lab.wait_until(lambda: site.lab.job_output(job), bool, f"job {job} past its prolog")
    site.lab.run(["scontrol", *change])
    try:
        before = site.lab.wait_until(
            lambda: site.lab.node_state("n3"), lambda seen: state in seen["State"], state
        )
        site.on("n3", "touch", FLAG)
        site.health_check("n3")
        after = site.lab.node_state("n3")
        same = ("State", "Reason")
        assert [after.get(key) for key in same] == [before.get(key) for key in same]
        for _ in range(4):
            site.on("n3", "rm", "-f", FLAG)
            site.health_check("n3")
        assert site.lab.node_state("n3").get("Reason") == before.get("Reason")
    finally:
        if undo:
            site.lab.run(["scontrol", *undo], check=False)
        site.lab.run(["scontrol", "update", "NodeName=n3", "State=RESUME"], check=False)


# --- what doctor says of a real Slurm -------------------------------------------------------------


def doctor(site: HookedSite) -> dict[str, str]:
    argv = [COMMAND, "doctor", "--config", f"{site.installed}/etc/config.toml", "--json"]
    ran = site.lab.run(argv, node="n1", check=False)
    report = json.loads(ran.stdout)
    assert ran.returncode == (1 if report["counts"]["change"] else 0)
    texts: dict[str, str] = dict.fromkeys(("change", "look", "fine"), "")
    for advice in report["advice"]:
        texts[advice["level"]] += f"{advice['text']} | {advice['do']}\n"
    return texts


def test_a_site_installed_as_documented_needs_no_change(site: HookedSite) -> None:
    texts = doctor(site)
    assert texts["change"] == ""
    for line in ("Prolog=", "Epilog=", "Alloc and DeferBatch", "HealthCheckProgram"):
        assert line in texts["fine"]
    assert "nodes are read through" in texts["fine"]


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


def test_every_mistake_is_named_with_what_to_do_and_without_slurmctld_the_rest(
    tmp_path: Path,
) -> None:
    install(tmp_path)
    (tmp_path / "epilog.d").mkdir()
    breaker = f'[breaker]\ndirectory = "{tmp_path}/shared"\n'
    write_site(tmp_path / "etc", f'journal = "/tmp/journals"\n{breaker}[checks.memory]\n')
    conf = MISTAKES.format(directory=tmp_path)
    with Lab.start(nodes=2, slurm_conf_extra=conf, visible=[tmp_path]) as lab:
        site = HookedSite(lab, tmp_path)
        texts = doctor(site)
        lab.kill_slurmctld()
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
