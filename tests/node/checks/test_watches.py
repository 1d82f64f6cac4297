# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.watches import Watches
from slurm_health.node.rules.finding import UNWATCHED, Finding, Status
from slurm_health.system import WATCHED
from tests.node.checks.conftest import find_out, process
from tests.support.sites import tree


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


def test_a_watch_that_lives_passes_and_the_file_of_a_job_that_is_gone_is_removed(
    signs: Signs,
) -> None:
    alive, gone = signs.touch(f"{UID}.12", 50), signs.touch(f"{UID}.9", 4000)

    assert signs.found().status is Status.PASS
    assert (alive.exists(), gone.exists()) == (True, False)


@pytest.mark.parametrize("name", [f"{UID + 1}.12", f"{UID}.x", "12"])
def test_a_file_that_no_agent_of_its_user_can_have_made_says_nothing(
    signs: Signs, name: str
) -> None:
    signs.touch(name, 4000)

    assert signs.found().status is Status.NOT_APPLICABLE


def test_a_link_is_not_followed(signs: Signs) -> None:
    (signs.directory / f"{UID}.12").symlink_to("/proc/1/status")

    assert signs.found().status is Status.NOT_APPLICABLE


def test_its_directory_is_open_to_all_users_and_sticky(signs: Signs) -> None:
    signs.found()

    assert signs.directory.stat().st_mode & 0o7777 == 0o1777
