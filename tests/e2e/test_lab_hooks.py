# SPDX-License-Identifier: Apache-2.0
"""The hooks under a real slurmd and slurmctld: what Slurm says afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.hooks_support import FLAG, HIDDEN, HookedSite, hooked_site
from tests.played_gpu import nvml_library

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

JOB = "#!/bin/sh\nhostname\n"
# Calls that only somebody who asks about nodes, or changes them, makes.
ASKING = ("NODE_INFO", "UPDATE_NODE", "PARTITION_INFO", "BUILD_INFO", "PING", "JOB_USER_INFO")
CHECKS = "".join(
    f"[checks.c{number}]\ncheck='file'\npath='/etc/passwd'\n" for number in range(10)
) + "".join(
    f"[checks.{name}]\n{rest}\n"
    for name, rest in {
        "memory": "",
        "swap": "",
        "load": "",
        "zombies": "",
        "uninterruptible": "",
        "clocksource": "",
        "cpus": "min_online=1",
        "clock": "synchronised=false",
        "root": "check='filesystem'\npath='/'",
    }.items()
)


@pytest.fixture(scope="module")
def module_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HookedSite]:
    directory = tmp_path_factory.mktemp("hooks")
    gpus = 0 if nvml_library.missing() else 8
    with hooked_site(directory, nodes=5, gpus=gpus) as site:
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    module_site.configure()
    yield module_site
    module_site.configure()
    module_site.lab.reset()


def asked(site: HookedSite) -> dict[str, int]:
    return {
        name: count for name, count in site.calls().items() if any(word in name for word in ASKING)
    }


@pytest.mark.heavy
def test_a_healthy_prolog_and_epilog_of_twenty_checks_ask_slurm_nothing(site: HookedSite) -> None:
    site.configure(CHECKS)
    site.forget_calls()
    jobs = [site.lab.sbatch(JOB, "-N5") for _ in range(3)]
    for job in jobs:
        site.lab.wait_job(job)
    assert asked(site) == {}
    assert site.out_of_pool() == {}


def test_a_healthy_health_check_asks_slurm_nothing(site: HookedSite) -> None:
    site.configure(CHECKS)
    site.forget_calls()
    for node in site.lab.nodes:
        site.health_check(node)
    assert asked(site) == {}


def test_a_node_notices_that_scontrol_has_returned_it(site: HookedSite) -> None:
    record = site.lab.paths.tmp("n1") / "slurm-health-state/drained.json"
    site.on("n1", "touch", FLAG)
    site.health_check("n1")
    assert "n1" in site.out_of_pool()
    assert record.exists()

    site.on("n1", "rm", FLAG)
    site.lab.run(["scontrol", "update", "NodeName=n1", "State=RESUME"])
    site.health_check("n1")

    assert not record.exists()
    assert "it was returned to the pool" in site.hook_log("n1")


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
    assert reason.startswith("shealth:flag ")
    assert f" check=flag job={job} t=" in reason
    assert f"{FLAG} exists" in reason
    # The count that a well node keeps at nothing does count.
    assert sum(asked(site).values()) >= 3


def test_srun_on_a_node_whose_prolog_fails_ends_and_the_next_one_goes_elsewhere(
    site: HookedSite,
) -> None:
    site.on("n1", "touch", FLAG)
    ran = site.lab.run(["srun", "-wn1", "hostname"], user="alice", check=False)
    assert ran.returncode != 0
    # The second where srun hears of the prolog before slurmctld has ended the job.
    said = ("Something is wrong with the boot of the nodes", "Prolog failure on node n1")
    assert any(words in ran.stderr for words in said), ran.stderr
    assert list(site.out_of_pool()) == ["n1"]
    again = site.lab.run(["srun", "hostname"], user="alice")
    assert again.stdout.strip() != "n1"


def test_a_job_of_many_nodes_loses_the_bad_one_only(site: HookedSite) -> None:
    site.on("n2", "touch", FLAG)
    job = site.lab.sbatch(JOB, "-N4", "-wn2")
    site.lab.wait_until(site.out_of_pool, bool, "n2 drained", 60)
    assert list(site.out_of_pool()) == ["n2"]
    site.lab.run(["scancel", str(job)])


@pytest.mark.heavy
def test_a_node_we_drained_comes_back_after_three_passes(site: HookedSite) -> None:
    site.on("n3", "touch", FLAG)
    site.health_check("n3")
    assert list(site.out_of_pool()) == ["n3"]
    for _ in range(4):
        site.health_check("n3")
    assert list(site.out_of_pool()) == ["n3"]
    site.on("n3", "rm", FLAG)
    for _ in range(2):
        site.health_check("n3")
    assert list(site.out_of_pool()) == ["n3"]
    site.health_check("n3")
    assert site.out_of_pool() == {}


@pytest.mark.parametrize("note", ["ADMIN SHUTDOWN", "NHC: check_x", "shealth:words of no hook"])
def test_anothers_drain_is_neither_lifted_nor_renamed(site: HookedSite, note: str) -> None:
    update = ["scontrol", "update", "NodeName=n3", "State=DRAIN", f"Reason={note}"]
    site.lab.run(update)
    site.on("n3", "touch", FLAG)
    site.health_check("n3")
    site.on("n3", "rm", FLAG)
    for _ in range(6):
        site.health_check("n3")
    assert site.out_of_pool()["n3"].startswith(note)


def test_a_drain_that_an_administrator_renamed_stays(site: HookedSite) -> None:
    site.on("n3", "touch", FLAG)
    site.health_check("n3")
    site.lab.run(["scontrol", "update", "NodeName=n3", "Reason=waiting for a new board"])
    site.on("n3", "rm", FLAG)
    for _ in range(6):
        site.health_check("n3")
    assert site.out_of_pool()["n3"].startswith("waiting for a new board")


@pytest.mark.heavy
def test_a_node_with_a_reboot_pending_is_not_given_back(site: HookedSite) -> None:
    site.on("n3", "touch", FLAG)
    site.health_check("n3")
    site.on("n3", "rm", FLAG)
    job = site.lab.sbatch("#!/bin/sh\nsleep 60\n", "-N1", "-wn4")
    site.lab.wait_job(job, {"RUNNING"})
    site.lab.run(["scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=x"])
    for _ in range(6):
        site.health_check("n3")
    assert "DOWN" in site.lab.node_state("n3")["State"]


@pytest.mark.heavy
def test_a_whole_rack_that_fails_at_once_is_not_drained(site: HookedSite) -> None:
    site.configure(share=0.4)
    for node in site.lab.nodes:
        site.on(node, "touch", FLAG)
    for node in site.lab.nodes:
        site.health_check(node)
    assert len(site.out_of_pool()) == 2
    job = site.lab.sbatch(JOB, "-N1")
    site.lab.wait_job(job)  # it runs, unchecked and with a loud line, and nobody else is lost
    assert len(site.out_of_pool()) == 2


def test_a_user_without_rights_gets_a_truly_bad_node_drained(site: HookedSite) -> None:
    site.on("n3", "touch", HIDDEN)
    job = site.accuse("n3")
    reason = site.out_of_pool()["n3"]
    assert reason.startswith("shealth:deep ")
    assert f" check=deep job={job} t=" in reason


def test_the_journal_of_an_older_job_of_that_id_accuses_nobody(site: HookedSite) -> None:
    """Slurm 22.05 does not tell an epilog when its job started."""
    site.on("n3", "touch", HIDDEN)
    script = site.accusation("n3")
    aged = script.replace("\nEND\n", '\nos.utime(run / "master.jsonl", (1e9, 1e9))\nEND\n')
    assert aged != script
    job = site.lab.sbatch(aged, "-wn3")
    site.lab.wait_job(job)
    site.lab.wait_nodes()
    assert site.out_of_pool() == {}
    site.accuse("n3")
    assert list(site.out_of_pool()) == ["n3"]


@pytest.mark.heavy
def test_a_user_cannot_get_a_good_node_drained(site: HookedSite) -> None:
    for _ in range(4):
        site.accuse("n3")
    assert site.out_of_pool() == {}
    assert list((site.installed / "shared/marks").glob("n3.json"))


def test_a_user_cannot_accuse_a_node_the_job_did_not_run_on(site: HookedSite) -> None:
    site.on("n5", "touch", HIDDEN)
    site.accuse("n3", "n5")
    assert site.out_of_pool() == {}
    assert not (site.installed / "shared/marks/n5.json").exists()


def test_jobs_of_two_users_add_up(site: HookedSite) -> None:
    site.accuse("n3", user="alice")
    site.accuse("n3", user="alice")
    assert site.out_of_pool() == {}
    site.accuse("n3", user="bob")
    assert "check=marks" in site.out_of_pool()["n3"]


def test_a_job_may_opt_out_where_the_site_allows_it(site: HookedSite) -> None:
    site.on("n1", "touch", FLAG)
    job = site.lab.sbatch(JOB, "-wn1", "--comment=nocheck")
    site.lab.wait_job(job)
    assert site.lab.job_output(job).strip() == "n1"
    assert site.out_of_pool() == {}


def test_a_hung_check_delays_the_job_by_its_limit_and_no_node_is_lost(site: HookedSite) -> None:
    site.configure("[checks.hung]\ncheck='command'\nargv=['sleep','600']\ntime_limit_s=1\n")
    job = site.lab.sbatch(JOB, "-N2")
    site.lab.wait_job(job)
    assert site.out_of_pool() == {}


@pytest.mark.parametrize("text", ["[checks.memry]\n", "[[[", "[hooks]\nstate='x'\n"])
def test_an_impossible_configuration_costs_no_node(site: HookedSite, text: str) -> None:
    (site.installed / "etc/config.toml").write_text(text)
    job = site.lab.sbatch(JOB, "-N5")
    site.lab.wait_job(job)
    assert site.out_of_pool() == {}


def test_a_missing_interpreter_costs_no_node(site: HookedSite) -> None:
    prolog = site.installed / "prolog"
    text = prolog.read_text()
    prolog.write_text(text.replace("\npython=", "\npython=/nowhere"))
    try:
        job = site.lab.sbatch(JOB, "-N5")
        site.lab.wait_job(job)
    finally:
        prolog.write_text(text)
    assert site.out_of_pool() == {}


def test_a_gpu_that_has_fallen_off_the_bus_is_named_in_the_note(site: HookedSite) -> None:
    if reason := nvml_library.missing():
        pytest.skip(reason)
    site.configure("[checks.gpu]\ncount=8\n")
    site.lab.fault.gpu_vanish("n4", 3)
    site.lab.sbatch(JOB, "-N1", "-wn4")
    site.lab.wait_until(site.out_of_pool, bool, "n4 drained", 60)
    assert list(site.out_of_pool()) == ["n4"]
    assert "check=gpu" in site.out_of_pool()["n4"]
    assert "GPU 3 is lost" in site.out_of_pool()["n4"]
