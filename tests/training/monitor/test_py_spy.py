# SPDX-License-Identifier: Apache-2.0
"""Stacks of processes that say nothing themselves, by the real py-spy where it is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.training.monitor import voices

WAITS = "def wait_for_data():\n    input()\nprint('there', flush=True)\nwait_for_data()\n"
WAIT_S = 60.0
needs_py_spy = pytest.mark.skipif(voices.find_py_spy() is None, reason="py-spy is not installed")


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose main thread is in `wait_for_data`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def command(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def functions(pid: int) -> list[str]:
    """Ask until it is where it comes to rest: what is read while it moves may be torn."""
    until_s = time.monotonic() + WAIT_S
    while True:
        read = voices.read_stacks([pid], wait_s=WAIT_S)
        found = [each.function for each in read.by_pid.get(pid, ())]
        if found[-1:] == ["wait_for_data"] or time.monotonic() > until_s:
            return found


@needs_py_spy
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_seen_where_it_is_even_when_it_is_stopped(
    waiting: subprocess.Popen[bytes], stopped: bool
) -> None:
    if stopped:
        assert functions(waiting.pid)
        os.kill(waiting.pid, signal.SIGSTOP)

    assert functions(waiting.pid) == ["<module>", "wait_for_data"]


@needs_py_spy
def test_a_process_that_has_ended_has_none_and_why(waiting: subprocess.Popen[bytes]) -> None:
    waiting.kill()
    waiting.wait()
    read = voices.read_stacks([waiting.pid], wait_s=WAIT_S)

    assert read.by_pid == {}
    assert read.why_not


def test_without_the_right_to_trace_it_says_so(tmp_path: Path) -> None:
    denied = command(tmp_path / "py-spy", "echo 'Permission Denied: Try again as root' >&2; exit 1")
    read = voices.read_stacks([os.getpid()], wait_s=WAIT_S, command=denied)

    assert read == voices.Stacks(why_not="py-spy may not look: ptrace is not allowed here")


@pytest.mark.parametrize(
    "text", ["sleep 600", "echo '['", "echo '[]'", "echo no stack >&2; exit 2"]
)
def test_one_that_hangs_or_answers_nonsense_costs_its_stacks_alone(
    tmp_path: Path, text: str
) -> None:
    read = voices.read_stacks([1, 2], wait_s=1.0, command=command(tmp_path / "py-spy", text))

    assert read.by_pid == {}
    assert read.why_not
