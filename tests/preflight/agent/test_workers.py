# SPDX-License-Identifier: Apache-2.0
"""How the workers of a node get ready, and what is said where they do not."""

from __future__ import annotations

import os
from typing import Any

import pytest

from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.workers import OPEN_S
from slurm_health.records.records import DevicesUnopened, VerdictReached, WorkersFailed
from tests.support.agent_stage import Stage, end_of
from tests.support.journals import Clock
from tests.support.supervised import write_executable


def test_workers_that_are_stopped_as_often_as_they_start_have_failed(stage: Stage) -> None:
    script = "#!/bin/sh\nkill -STOP $$\n"
    stage.begin()
    stage.start(python=write_executable(stage.behaviour / "python", script))

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its check process stands still: stopped by a signal for 1 s"
    assert not failed.device_failed
    assert stage.kinds().count("WorkersStarting") == 1


BUSY = "device 0 (used by process 4711, python of alice): out of memory"
ECC = "device 3: CUDA error: uncorrectable ECC error encountered"
UNSEEN = "Slurm gave the job 4 GPUs here, none of them can be seen"


@pytest.mark.parametrize(
    ("how", "environ", "failed", "starting"),
    [
        ("well", {"SLURM_GPUS_ON_NODE": "4"}, {"reason": UNSEEN}, 0),
        ("refusing", {}, {"reason": BUSY, "torch": "2.4.0"}, 1),
        ("no-torch", {}, {"reason": "its python has no torch", "no_torch": True}, 0),
        ("broken-device", {}, {"reason": ECC, "torch": "2.4.0", "device_failed": True}, 1),
    ],
)
def test_why_the_workers_of_a_node_do_not_get_ready_is_told_and_the_agent_stays(
    stage: Stage, how: str, environ: dict[str, Any], failed: dict[str, Any], starting: int
) -> None:
    stage.begin()
    agent = stage.start(how, **environ)

    assert stage.hears(WorkersFailed) == WorkersFailed(node="n1", launch=0, **failed)
    assert stage.kinds().count("WorkersStarting") == starting
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def test_devices_that_do_not_open_are_named_once(stage: Stage) -> None:
    stage.begin()
    stage.behave("driver-hangs")
    environ = {
        **os.environ,
        "FAKE_WORKER_DIR": str(stage.behaviour),
        "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    clock = Clock(0.0)
    said_s: list[float] = []

    def passing() -> float:
        clock.now_s += 1.0
        if "DevicesUnopened" in stage.kinds():
            said_s.append(clock.now_s)
        if said_s and clock.now_s > said_s[0] + 2 * OPEN_S:
            stage.says(VerdictReached(nodes=[]))
        return clock.now_s

    Agent(stage.settings(silence_s=1e9), environ, monotonic=passing).run()

    unopened = stage.hears(DevicesUnopened)
    assert (unopened.devices, unopened.torch) == ([0, 1], "2.4.0")
    assert OPEN_S <= unopened.waited_s < OPEN_S + 10
    assert stage.kinds().count("DevicesUnopened") == 1
