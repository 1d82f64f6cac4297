# SPDX-License-Identifier: Apache-2.0
"""Processes: stuck, left over, and the daemons that should run."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.tasks import Daemon, Leftovers, Uninterruptible
from slurm_health.node.rules.finding import Status
from slurm_health.system.proc import parse_stat
from tests.node.checks.conftest import find_out, process
from tests.support.sites import tree

NODE, USER = Status.NODE_FAULT, Status.USER_FAULT


def test_a_process_may_have_brackets_and_spaces_in_its_name() -> None:
    found = parse_stat(process(7, "a) R (b c", "D")["/proc/7/stat"])
    assert (found.pid, found.name, found.state) == (7, "a) R (b c", "D")


def test_a_process_that_waits_in_the_kernel_for_a_moment_is_not_stuck(well: CheckContext) -> None:
    tree(well.root, process(9, "ls", "D"))
    check = Uninterruptible(max_count=0)
    assert "ls(9)" in find_out(check, well).text

    tree(well.root, process(9, "ls", "S"))
    assert find_out(check, well).status is Status.PASS


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0"}])
def test_leftovers_are_looked_for_only_after_a_users_job(
    environ: dict[str, str], well: CheckContext
) -> None:
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is Status.NOT_APPLICABLE


def test_leftovers_are_the_jobs_own_and_nobody_elses(well: CheckContext) -> None:
    uid = 4242
    for pid, whose, job in ((50, uid, "7"), (51, uid, "8"), (52, 4243, "7")):
        tree(
            well.root,
            {
                **process(pid, "sleep", uid=whose),
                f"/proc/{pid}/environ": f"A=1\0SLURM_JOB_ID={job}\0",
            },
        )
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(uid)}
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is USER
    assert "sleep(50)" in found.text
    assert "sleep(51)" not in found.text
    assert "sleep(52)" not in found.text


@pytest.mark.parametrize(("uid", "status"), [(0, Status.PASS), (1000, NODE), (4242, NODE)])
def test_a_users_program_does_not_stand_in_for_a_daemon(
    uid: int, status: Status, well: CheckContext
) -> None:
    """Whoever runs jobs can give a program any name; one with the set-user-id bit stays theirs."""
    tree(well.root, process(900, "chronyd", uid=uid))
    assert find_out(Daemon(name="chronyd"), well).status is status


def test_a_daemon_may_be_asked_of_one_user(well: CheckContext) -> None:
    assert find_out(Daemon(name="munged", user="root"), well).status is Status.PASS
    found = find_out(Daemon(name="munged", user="nobody"), well)
    assert found.status is NODE
    assert found.text == "no process munged of nobody"


def test_of_an_environment_that_its_owner_has_blown_up_only_the_beginning_is_read(
    well: CheckContext,
) -> None:
    text = f"A={'x' * (1 << 20)}\0SLURM_JOB_ID=7\0"
    tree(well.root, {**process(50, "sleep", uid=4242), "/proc/50/environ": text})
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "4242"}
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is not USER
