# SPDX-License-Identifier: Apache-2.0
"""What doctor says that depends on the release of Slurm."""

from __future__ import annotations

import math

import pytest

from slurm_health.node.doctor import cluster, slurm_conf
from slurm_health.node.doctor.advice import Advice, Urgency
from slurm_health.node.doctor.cluster import advise_on_size

NO_HOLD = "SchedulerParameters = nohold_on_prolog_fail"


def requeue(version: str, *lines: str) -> Advice:
    """Return what is said of the wait of a job whose prolog has failed."""
    config = slurm_conf.read_config("\n".join([f"SLURM_VERSION = {version}", *lines]))
    (advice,) = cluster.wait(config)
    return advice


@pytest.mark.parametrize(
    ("version", "lines", "level", "said"),
    [
        ("22.05.8", [NO_HOLD], Urgency.FINE, "after 120 s"),
        ("22.05.8", [NO_HOLD, "AuthInfo = cred_expire=60"], Urgency.FINE, "after 60 s"),
        ("22.05.8", [f"{NO_HOLD},requeue_delay=5"], Urgency.LOOK, "22.05 does not know: a job"),
        ("24.11.5", [NO_HOLD, "AuthInfo = cred_expire=600"], Urgency.LOOK, "cred_expire=600"),
        ("25.11.0", [NO_HOLD], Urgency.LOOK, "after 120 s: requeue_delay is not set"),
        ("25.11.0", [f"{NO_HOLD},requeue_delay=5"], Urgency.FINE, "after 5 s"),
        ("26.05.5", [f"{NO_HOLD},requeue_delay=500"], Urgency.LOOK, "requeue_delay=500"),
        (
            "26.05.5",
            [f"{NO_HOLD},requeue_delay=5", "AuthInfo = cred_expire=600"],
            Urgency.FINE,
            "after 5 s",
        ),
    ],
)
def test_how_long_a_requeued_job_waits_is_known_by_release(
    version: str, lines: list[str], level: Urgency, said: str
) -> None:
    advice = requeue(version, *lines)

    assert advice.level is level
    assert said in advice.text


def test_what_is_to_be_set_keeps_what_is_set() -> None:
    assert requeue("26.05.5", NO_HOLD).do == (
        "SchedulerParameters=nohold_on_prolog_fail,requeue_delay=5"
    )


def test_an_upgrade_is_said_to_bring_what_the_release_does_not_have_and_no_more() -> None:
    def gains(version: str) -> str:
        return " ".join(each.text for each in cluster.advise_on_release({"SLURM_VERSION": version}))

    assert "ForceRequeueOnFail" in gains("22.05.8")
    assert "ForceRequeueOnFail" not in gains("24.11.5")
    assert "requeue_delay" in gains("24.11.5")
    assert "requeue_delay" not in gains("26.05.5")
    assert "HealthCheckTimeout" in gains("25.11.2")
    assert gains("26.05.5") == gains("a fork") == ""


def test_a_health_check_is_ended_when_its_site_says_so() -> None:
    assert cluster.health_check_limit_s({}) == 60
    assert cluster.health_check_limit_s({"HealthCheckTimeout": "90 sec"}) == 90
    # As Slurm 26.05.5 shows what is not set.
    assert cluster.health_check_limit_s({"HealthCheckTimeout": "0 sec"}) == 60


@pytest.mark.parametrize(
    ("config", "nodes", "open_files", "said", "do"),
    [
        ({"TreeWidth": "16"}, 16_384, math.inf, "16384 nodes arrives after up to 4", "=26"),
        ({"TreeWidth": "5"}, 1_000, math.inf, "1000 nodes arrives after up to 5", "=32"),
        ({"MaxStepCount": "40"}, 8, math.inf, "MaxStepCount=40: a check takes", "=40000"),
        ({}, 16_384, 4_096, "may have 4096 files open", "LimitNOFILE=32832"),
    ],
)
def test_what_a_cluster_is_too_large_for_is_said(
    config: dict[str, str], nodes: int, open_files: float, said: str, do: str
) -> None:
    (found,) = advise_on_size(config, nodes, open_files)
    assert found.level is Urgency.LOOK
    assert said in found.text
    assert do in found.do


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        ({"TreeWidth": "50", "MaxStepCount": "40000"}, 16_384),
        ({"TreeWidth": "16", "MaxStepCount": "40000"}, 4_096),
        ({"TreeWidth": "1"}, 3),
        ({"TreeWidth": "?", "MaxStepCount": "?"}, 100_000),
        ({}, 0),
    ],
)
def test_what_fits_or_is_not_known_needs_nothing(config: dict[str, str], nodes: int) -> None:
    assert [each.level for each in advise_on_size(config, nodes, math.inf)] == [Urgency.FINE]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("SlurmctldHost[1] = spare", "for up to 33 min"),
        ("SlurmctldHost[1] = spare\nSlurmdTimeout = 60 sec", "for up to 6 min"),
    ],
)
def test_with_a_backup_a_job_may_wait_for_a_prolog_that_was_not_heard_of(
    more: str, said: str
) -> None:
    config = f"PrologFlags = Alloc,DeferBatch\nSlurmctldHost[0] = head\n{more}"
    (advice,) = cluster.failover(slurm_conf.read_config(config))

    assert advice.text.startswith("2 SlurmctldHost: a job")
    assert said in advice.text
    assert advice.do.startswith("after a failover: scontrol requeue of those of which sstat -ai")


@pytest.mark.parametrize(
    "config",
    [
        "PrologFlags = Alloc,DeferBatch\nSlurmctldHost[0] = head",
        "PrologFlags = Alloc\nSlurmctldHost[0] = head\nSlurmctldHost[1] = spare",
    ],
)
def test_one_slurmctld_or_scripts_that_wait_for_no_prolog_lose_none(config: str) -> None:
    assert cluster.failover(slurm_conf.read_config(config)) == []
