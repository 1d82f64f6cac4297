# SPDX-License-Identifier: Apache-2.0
"""A script whose training hangs is ended with all that it started, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.script_process import end_script
from tests.support.supervised import eventually

# What a script may leave hanging: a child in a session of its own that ignores SIGTERM, with a
# child that is stopped, as of a torchrun.
HANGS = f"""
setsid {sys.executable} -c '
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
open("pids", "w").write(str(os.getpid()) + " " + str(child.pid) + " ")
time.sleep(600)
' &
wait
echo went on
"""


def started(directory: Path, script: str) -> subprocess.Popen[bytes]:
    with (directory / "out").open("w") as out:
        return subprocess.Popen(
            ["/bin/bash", "-c", script], cwd=directory, stdout=out, process_group=0
        )


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_it_started_ends_with_it_in_whatever_session_and_state(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    script = started(tmp_path, HANGS)
    pids = tmp_path / "pids"
    eventually(lambda: pids.exists() and pids.read_text().endswith(" "), "the hanging children")
    children = list(map(int, pids.read_text().split()))
    eventually(
        lambda: "State:\tT" in Path(f"/proc/{children[1]}/status").read_text(), "the stopped child"
    )

    end_script(script.pid, grace_s=0.5)

    eventually(lambda: not any(map(lives, children)), "the end of the children")
    assert script.wait() == -signal.SIGTERM
    assert (tmp_path / "out").read_text() == ""
    assert lives(other.pid)
    other.kill()
    other.wait()


@pytest.mark.parametrize("grace_s", [30.0])
def test_a_script_that_ends_by_itself_is_given_the_time_to(tmp_path: Path, grace_s: float) -> None:
    trap = "trap 'echo cleans up; kill $!; exit 7' TERM; touch ready; sleep 600 & wait"
    script = started(tmp_path, trap)
    eventually((tmp_path / "ready").exists, "the trap")
    # The shell may not yet wait: a signal that comes before that ends the wait as well.
    end_script(script.pid, grace_s=grace_s)

    assert script.wait() == 7
    assert (tmp_path / "out").read_text() == "cleans up\n"


def test_one_that_has_ended_already_is_no_error(tmp_path: Path) -> None:
    script = started(tmp_path, "exit 3")
    os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)

    end_script(script.pid, grace_s=0.5)

    assert script.wait() == 3
