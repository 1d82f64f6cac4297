# SPDX-License-Identifier: Apache-2.0
"""Agents that play nodes on this machine, started, heard and ended without Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.master.launcher import (
    LocalLauncher,
)
from slurm_health.records.records import LossCause
from tests.preflight.master.test_launcher import NODES, losses

Start = Callable[..., LocalLauncher]


@pytest.fixture
def local() -> Iterator[Start]:
    launchers: list[LocalLauncher] = []

    def launcher(script: str, **environ: str) -> LocalLauncher:
        def command(launch: int, node: str | None) -> list[str]:
            return [sys.executable, "-c", script, str(launch), str(node)]

        launchers.append(LocalLauncher(command, {**os.environ, **environ}, NODES))
        return launchers[-1]

    yield launcher
    for each in launchers:
        each.stop(0.0)


def test_a_local_agent_is_told_its_node_and_its_share_of_the_machine(
    local: Start, tmp_path: Path
) -> None:
    launcher = local(
        f"import os, sys; open('{tmp_path}/' + sys.argv[2], 'w').write("
        "os.environ['SLURM_CPUS_ON_NODE'] + ' ' + os.environ['SLURM_LAUNCH_NODE_IPADDR'])"
    )

    launcher.start(0, ["n1", "n2"])
    losses(launcher, NODES)

    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {(tmp_path / node).read_text() for node in NODES} == {f"{share} 127.0.0.1"}


def test_local_agents_have_different_devices_and_keep_them_when_started_again(
    local: Start, tmp_path: Path
) -> None:
    devices = "CUDA_VISIBLE_DEVICES"
    launcher = local(
        "import os, sys; open(f'{tmp_path}/{sys.argv[2]}.{sys.argv[1]}', 'w').write("
        f"os.environ['{devices}'])".replace("{tmp_path}", str(tmp_path)),
        **{devices: "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"},
    )

    launcher.start(0, NODES)
    losses(launcher, NODES)
    launcher.start(1, ["n2"])
    losses(launcher, ["n2"], launch=1)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "n1.0": "GPU-a,GPU-b",
        "n2.0": "GPU-c,GPU-d",
        "n2.1": "GPU-c,GPU-d",
    }


@pytest.mark.parametrize(
    ("end", "cause", "reason"),
    [
        (4, LossCause.ENDED, "its agent ended: exit code 4: last"),
        ("slurm-health agent: n1: does not see it", LossCause.NO_JOURNAL, "does not see it"),
    ],
)
def test_a_local_agent_that_ends_is_lost_with_its_last_words(
    local: Start, end: int | str, cause: LossCause, reason: str
) -> None:
    launcher = local(f"import sys; print('first\\nlast', file=sys.stderr); sys.exit({end!r})")

    launcher.start(0, ["n1"])

    lost = losses(launcher, ["n1"])["n1"]
    assert (lost.cause, lost.reason) == (cause, reason)


def test_local_agents_that_do_not_leave_are_ended(local: Start) -> None:
    launcher = local(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
    )
    launcher.start(0, NODES)

    launcher.stop(0.0)

    assert launcher.poll() == []


_RINGS_WHEN_RUNG = """
import time
from slurm_health.preflight.orders import Bell
bell = Bell("{node}")
while not bell.heard():
    time.sleep(0.01)
bell.ring()
time.sleep(60)
"""


@pytest.mark.parametrize(("named", "wait_s", "rung"), [("n1", 30.0, {"n1"}), ("n7", 2.0, set())])
def test_local_agents_hear_the_bell_and_are_heard_in_their_own_name(
    local: Start, named: str, wait_s: float, rung: set[str]
) -> None:
    launcher = local(_RINGS_WHEN_RUNG.replace("{node}", named))
    launcher.start(0, ["n1"])
    assert launcher.wait(0.1, 0.0) == set()

    launcher.ring()

    assert launcher.wait(wait_s, 0.0) == rung


def test_an_agent_that_prints_without_end_holds_nobody_up(local: Start) -> None:
    launcher = local("import os\nwhile True: os.write(1, b'y' * 4096)")
    launcher.start(0, ["n1"])
    for _ in range(3):
        assert launcher.wait(0.5, 0.2) == set()
    assert launcher.poll() == []
