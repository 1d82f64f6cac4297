# SPDX-License-Identifier: Apache-2.0
"""The monitor beside a script begins and ends with it, and changes nothing about it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from slurm_health.system import proc
from tests.support.supervised import Bench, eventually, with_variable

ONE_NODE = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
# A training in the batch script itself, until the file `end` is there.
TRAINS = f"""#!/bin/bash
{sys.executable} -c '
import os, time
from slurm_health import heartbeat
step = 0
while not os.path.exists("end"):
    heartbeat.step(step)
    step += 1
    time.sleep(0.05)
' &
wait $!
exit 5
"""
WATCH = "slurm_health.training.monitor.watch"


def start(bench: Bench, script: str, mode: str = "report", after_s: str = "0") -> subprocess.Popen:  # type: ignore[type-arg]
    return bench.supervised(
        script,
        options=(f"--monitor={mode}", f"--monitor-after-s={after_s}"),
        environ={**bench.environ(), **ONE_NODE},
        cwd=bench.directory,
    )


def running(bench: Bench, module: str) -> list[int]:
    """Return the processes that run a module of ours for this test, by its temporary directory."""
    found = []
    for pid in with_variable("TMPDIR", str(bench.temporary)):
        with contextlib.suppress(OSError):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def agents(bench: Bench) -> list[int]:
    """Return the forks of the watch."""
    watches = running(bench, WATCH)
    with contextlib.suppress(OSError):  # one has ended meanwhile
        return [pid for pid in watches if proc.stat(Path(f"/proc/{pid}")).parent in watches]
    return []


def test_a_script_of_seconds_is_not_held_up(bench: Bench) -> None:
    (bench.directory / "end").touch()
    waits = "#!/bin/bash\nuntil [ -e end ]; do sleep 0.05; done\nexit 5\n"
    code, _, said = bench.finish(start(bench, waits, after_s="600"))

    assert code == 5
    assert running(bench, WATCH) == []
    assert b"monitor" not in said


def test_off_starts_nothing(bench: Bench) -> None:
    process = start(bench, TRAINS, mode="off")
    eventually(lambda: running(bench, "heartbeat"), "the training")
    assert running(bench, WATCH) == []
    (bench.directory / "end").touch()

    assert bench.finish(process)[0] == 5


def test_a_script_whose_watch_is_killed_runs_on(bench: Bench) -> None:
    process = start(bench, TRAINS)
    eventually(lambda: agents(bench), "an agent")
    for pid in set(running(bench, WATCH)) - set(agents(bench)):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not running(bench, WATCH), "the end of the agent")
    assert process.poll() is None
    (bench.directory / "end").touch()

    assert bench.finish(process)[0] == 5


def test_an_agent_that_is_killed_is_started_again_and_its_node_is_not_blamed(bench: Bench) -> None:
    process = start(bench, TRAINS)
    eventually(lambda: agents(bench), "an agent")
    killed = agents(bench)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(agents(bench)) - set(killed), "another agent")
    (bench.directory / "end").touch()
    code, _, said = bench.finish(process)

    assert code == 5
    assert said.count(b"the agent on n1 ended; it is started again") == 1
    assert said.count(b"monitor") == 1


def test_a_supervisor_that_is_killed_leaves_no_monitor(bench: Bench) -> None:
    process = start(bench, TRAINS)
    eventually(lambda: agents(bench), "an agent")
    process.kill()
    process.wait()

    eventually(lambda: not running(bench, WATCH), "the end of watch and agent")


def test_signals_for_the_script_do_not_end_its_monitor(bench: Bench) -> None:
    process = start(bench, TRAINS)
    eventually(lambda: agents(bench), "an agent")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        for pid in running(bench, WATCH):
            status = Path(f"/proc/{pid}/status").read_text()
            assert int(status.partition("SigIgn:")[2].split()[0], 16) >> number - 1 & 1, number
            os.kill(pid, number)
    assert len(running(bench, WATCH)) == 2
    (bench.directory / "end").touch()
    assert bench.finish(process)[0] == 5
    assert agents(bench) == []
