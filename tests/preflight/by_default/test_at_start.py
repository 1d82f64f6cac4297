# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import msgspec
import pytest

from slurm_health.preflight.by_default.at_start import Rules, choose
from slurm_health.preflight.decide.policy import Heartbeat, OnHang
from slurm_health.preflight.job_spec import JobSpec

SCRIPT = b"#!/bin/sh\necho ran\n"
NODES = {b"SLURM_JOB_NUM_NODES": b"4"}


def told(**rules: object) -> str:
    return msgspec.json.encode(msgspec.convert(rules, Rules)).decode()


def test_a_job_that_the_rules_name_is_checked_without_a_monitor() -> None:
    choice = choose(told(min_nodes=4), SCRIPT, NODES)

    assert choice.spec is not None
    assert choice.spec == JobSpec(unasked=True, monitor=OnHang.OFF, heartbeat=Heartbeat.OFF)
    assert choice.said == ""


@pytest.mark.parametrize(
    ("rules", "environ"),
    [
        ({"min_nodes": 5}, {}),
        ({"partitions": ["gpu"]}, {b"SLURM_JOB_PARTITION": b"cpu"}),
        ({"accounts": ["a", "b"]}, {b"SLURM_JOB_ACCOUNT": b"c"}),
    ],
)
def test_what_the_job_was_given_decides(
    rules: dict[str, object], environ: dict[bytes, bytes]
) -> None:
    assert choose(told(**rules), SCRIPT, NODES | environ).spec is None


@pytest.mark.parametrize(
    ("environ", "monitor"),
    [
        ({b"SLURM_JOB_NUM_NODES": b"2"}, OnHang.REPORT),
        ({b"SLURM_JOB_NUM_NODES": b"1", b"SLURM_NTASKS": b"4"}, OnHang.REPORT),
        ({b"SLURM_JOB_NUM_NODES": b"1", b"SLURM_GPUS_ON_NODE": b"8"}, OnHang.REPORT),
        ({b"SLURM_JOB_NUM_NODES": b"1", b"SLURM_NTASKS": b"1"}, OnHang.OFF),
    ],
)
def test_a_job_of_several_ranks_is_watched_without_a_word_in_its_output(
    environ: dict[bytes, bytes], monitor: OnHang
) -> None:
    choice = choose(told(watch=True), SCRIPT, environ)
    in_script = choose(told(watch=True), b"#!/bin/sh\n#HEALTH --monitor=off\n", environ)
    asked = choose(told(watch=True), b"#!/bin/sh\n#HEALTH --monitor=report\n", environ)

    assert choice.spec == JobSpec(unasked=True, monitor=monitor, heartbeat=Heartbeat.OFF)
    assert choice.quiet
    assert in_script.spec is not None
    assert (in_script.spec.monitor, in_script.quiet) == (OnHang.OFF, True)
    assert not asked.quiet


def test_what_slurm_does_not_tell_excepts_no_job() -> None:
    rules = told(min_nodes=2, partitions=["gpu"], accounts=["a"])

    assert choose(rules, SCRIPT, {}).spec is not None


def test_the_wishes_of_the_user_count() -> None:
    script = b"#!/bin/sh\n#HEALTH --check=thorough --monitor=report\n"
    choice = choose(told(check="quick"), script, NODES | {b"SLURM_HEALTH_MAX_REQUEUES": b"5"})

    assert choice.spec is not None
    spec = choice.spec
    assert (spec.check, spec.monitor, spec.max_requeues) == ("thorough", OnHang.REPORT, 5)


def test_only_where_the_site_lets_them_do_users_leave_the_check_out() -> None:
    script = b"#!/bin/sh\n#HEALTH --check=off\n"

    assert choose(told(may_opt_out=True), script, NODES).spec is None
    kept = choose(told(check="quick"), script, NODES).spec
    assert kept is not None
    assert kept.check == "quick"


def test_wishes_that_cannot_be_understood_are_told_and_the_job_is_checked() -> None:
    environ = NODES | {b"SLURM_HEALTH_CHECK": b"quick"}
    choice = choose(told(), b"#!/bin/sh\n#HEALTH --no-such\n", environ)

    assert choice.spec is not None
    assert choice.spec.check == "quick"
    assert "--no-such" in choice.said


def test_rules_that_cannot_be_read_leave_the_job_unchecked() -> None:
    choice = choose("{", SCRIPT, NODES)

    assert choice.spec is None
    assert "cannot be read" in choice.said
