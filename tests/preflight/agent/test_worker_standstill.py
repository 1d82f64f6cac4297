# SPDX-License-Identifier: Apache-2.0
"""Real processes that stand still, and ones that only look like it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.agent.worker_process import (
    HELD_S,
    LOOK_S,
    STOPPED_S,
    Gone,
    StandstillWatch,
)
from tests.support.frozen import FREEZER, frozen
from tests.support.supervised import eventually


@pytest.fixture
def process() -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    eventually(lambda: state(child.pid) == "S", "a process that sleeps")
    yield child.pid
    child.kill()
    child.wait(20)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def watched(pid: int, for_s: float, every_s: float = LOOK_S) -> Gone | None:
    """Return what is found of a process that is looked at so long, and so often."""
    watch = StandstillWatch(pid)
    for look in range(round(for_s / every_s) + 1):
        watch.look(1000.0 + look * every_s)
    return watch.found()


def test_a_process_that_was_stopped_by_a_signal_stands_still(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: state(process) == "T", "a stopped process")

    assert watched(process, STOPPED_S - LOOK_S) is None
    found = watched(process, STOPPED_S)

    assert found == Gone("stopped by a signal for 1 s", still=True, stopped=True)


def test_a_process_that_goes_on_again_has_not_stood_still(process: int) -> None:
    watch = StandstillWatch(process)
    for look in range(40):
        os.kill(process, signal.SIGSTOP)
        eventually(lambda: state(process) == "T", "a stopped process")
        watch.look(1000.0 + look * LOOK_S)
        os.kill(process, signal.SIGCONT)
        eventually(lambda: state(process) == "S", "a process that goes on")

    assert watch.found() is None


def test_a_process_that_waits_or_works_is_never_said_to_stand_still(process: int) -> None:
    assert watched(process, 3600.0) is None
    assert watched(os.getpid(), 3600.0) is None


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
def test_a_process_that_the_kernel_holds_stands_still_and_was_not_stopped(process: int) -> None:
    with frozen(process):
        eventually(lambda: state(process) == "D", "a process that is held")

        assert watched(process, HELD_S - LOOK_S) is None
        found = watched(process, HELD_S)
        os.kill(process, signal.SIGKILL)  # and ends when it is thawed

    assert found is not None
    assert not found.stopped
    assert found.how.startswith("held in the kernel")


def test_time_in_which_nobody_looked_does_not_count(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: state(process) == "T", "a stopped process")
    watch = StandstillWatch(process)

    watch.look(1000.0)
    watch.look(1600.0)

    assert watch.found() is None


def test_a_process_that_is_gone_does_not_stand_still() -> None:
    child = subprocess.Popen(["true"])
    child.wait(20)

    assert watched(child.pid, 60.0) is None
