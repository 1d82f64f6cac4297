# SPDX-License-Identifier: Apache-2.0
"""Processes, the watches of jobs, and the speed of processors."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.cpu_speed import CpuSample, CpuSpeed, sample_cpus
from slurm_health.node.checks.tasks import Leftovers
from slurm_health.node.checks.watches import Watches
from slurm_health.node.rules.finding import UNWATCHED, Finding, Status
from slurm_health.records.errors import Unmeasured
from slurm_health.system import WATCHED
from tests.node.checks.conftest import find_out, process
from tests.support.rows import rows
from tests.support.sites import tree

USER = Status.USER_FAULT


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0"}])
def test_leftovers_are_those_of_users_jobs(environ: dict[str, str], well: CheckContext) -> None:
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is Status.NOT_APPLICABLE


def test_leftovers_are_the_jobs_own_and_nobody_elses(well: CheckContext) -> None:
    uid = 4242
    blown_up = f"{'x' * (1 << 20)}\0SLURM_JOB_ID=7"  # of which only the beginning is read
    for pid, whose, job in ((50, uid, "7"), (51, uid, "8"), (52, 4243, "7"), (53, uid, blown_up)):
        tree(
            well.root,
            {
                **process(pid, "a) R (b c" if pid == 50 else "sleep", uid=whose),
                f"/proc/{pid}/environ": f"A=1\0SLURM_JOB_ID={job}\0",
            },
        )
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(uid)}
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is USER
    assert "a) R (b c(50)" in found.text
    assert "sleep(51)" not in found.text
    assert "sleep(52)" not in found.text
    assert "53" not in found.text
    environ["SLURM_JOB_ID"] = "9"
    found = find_out(Leftovers(), msgspec.structs.replace(well, environ=environ))
    assert found.status is Status.PASS


# --- the signs of life of jobs' watches -----------------------------------------------------------


class Signs:
    """The files of agents, and a job 12 that runs."""

    def __init__(self, machine: CheckContext) -> None:
        self.machine = machine
        running = process(77, "python", "S")
        tree(machine.root, {**running, "/proc/77/environ": "A=1\0SLURM_JOB_ID=12\0"})
        self.directory = machine.path(WATCHED)
        self.directory.mkdir(parents=True)

    def touch(self, name: str, age_s: float) -> Path:
        path = self.directory / name
        path.touch()
        os.utime(path, (self.machine.now_s - age_s,) * 2)
        return path

    def found(self) -> Finding:
        return find_out(Watches(), self.machine)


@pytest.fixture
def signs(well: CheckContext) -> Signs:
    return Signs(well)


UID = os.getuid()


def test_a_job_that_runs_on_without_its_watch_is_named_with_how_long(signs: Signs) -> None:
    signs.touch(f"{UID}.12", 720)
    found = signs.found()
    since = time.strftime("%H:%M", time.localtime(signs.machine.now_s - 720))

    assert found.status is Status.WARN
    assert found.text == f"jobs on this node are not watched since {since}: 12"
    assert found.figures == {UNWATCHED: 1}


def test_the_progress_that_a_watch_has_left_is_shown_in_one_line(signs: Signs) -> None:
    signs.touch(f"{UID}.12", 0).write_text("step 7,\n\x1b[2Jcheckpoint 4 s ago")

    assert signs.found().figures["12"] == "step 7, [2Jcheckpoint 4 s ago"


def test_a_suspended_job_stands_still_with_its_watch(signs: Signs) -> None:
    stopped = process(77, "python", "T")
    tree(signs.machine.root, {**stopped, "/proc/77/environ": "A=1\0SLURM_JOB_ID=12\0"})
    signs.touch(f"{UID}.12", 720)

    assert signs.found().status is Status.PASS


def test_a_live_watch_passes_and_the_file_of_a_gone_job_goes(signs: Signs) -> None:
    alive, gone = signs.touch(f"{UID}.12", 50), signs.touch(f"{UID}.9", 4000)

    assert signs.found().status is Status.PASS
    assert (alive.exists(), gone.exists()) == (True, False)


@pytest.mark.parametrize("name", [f"{UID + 1}.12", f"{UID}.x", "12"])
def test_a_file_that_no_agent_made_says_nothing(signs: Signs, name: str) -> None:
    signs.touch(name, 4000)
    (signs.directory / f"{UID}.13").symlink_to("/proc/1/status")  # a link is not followed

    assert signs.found().status is Status.NOT_APPLICABLE
    assert signs.directory.stat().st_mode & 0o7777 == 0o1777  # open to all users and sticky


# --- the speed of processors ----------------------------------------------------------------------


QUIET = CpuSample(processors=4, wall_s=0.5, cpu_s=2.0, rounds=4_000_000, throttled_s=0, others_s=0)
CHECK = CpuSpeed(min_rounds_per_s=1_500_000)


def seen(**changes: float) -> CpuSample:
    return msgspec.structs.replace(QUIET, **changes)


@rows
def test_only_a_quota_or_a_quiet_and_slow_node_is_at_fault(
    changes: dict[str, float], status: Status, said: str
) -> None:
    assert "min_rounds_per_s is not set" in CpuSpeed().judge(seen(rounds=1)).text
    found = CHECK.judge(seen(**changes))
    assert found.status is status
    assert said in found.text


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n"])
def test_a_garbled_account_of_the_processors_is_unmeasured(tmp_path: Path, text: str) -> None:
    with pytest.raises(Unmeasured):
        CpuSpeed().measure(tree(tmp_path, {"/proc/stat": text}))


def test_this_machine_can_be_measured() -> None:
    found = sample_cpus(CheckContext(), 0.1)
    assert found.rounds > 0
    assert 0 < found.share <= 1.1
    assert found.others_s >= 0
