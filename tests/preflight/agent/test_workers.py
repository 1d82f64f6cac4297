# SPDX-License-Identifier: Apache-2.0
"""How the workers of a node get ready, and what is said where they do not."""

from __future__ import annotations

import os

from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.workers import OPEN_S
from slurm_health.records.records import DevicesUnopened, VerdictReached, WorkersFailed
from tests.support.agent_stage import Stage, end_of
from tests.support.journals import Clock
from tests.support.supervised import write_executable


def test_a_node_that_sees_fewer_gpus_than_slurm_gave_starts_no_worker(stage: Stage) -> None:
    stage.begin()
    stage.start(SLURM_GPUS_ON_NODE="4")

    reason = stage.hears(WorkersFailed).reason
    assert reason == "Slurm gave the job 4 GPUs here, none of them can be seen"


def test_workers_that_are_stopped_as_often_as_they_start_have_failed(stage: Stage) -> None:
    script = "#!/bin/sh\nkill -STOP $$\n"
    stage.begin()
    stage.start(python=write_executable(stage.behaviour / "python", script))

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its check process stands still: stopped by a signal for 1 s"
    assert not failed.device_failed
    assert stage.kinds().count("WorkersStarting") == 1


def test_why_a_device_is_not_used_is_told_as_its_worker_says_it(stage: Stage) -> None:
    stage.begin()
    agent = stage.start("refusing")

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "device 0 (used by process 4711, python of alice): out of memory"
    assert not failed.device_failed
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def test_without_torch_the_workers_have_failed_and_the_agent_stays(stage: Stage) -> None:
    stage.begin()
    agent = stage.start("no-torch")

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its python has no torch"
    assert failed.no_torch
    assert failed.accelerators == 0
    assert not failed.device_failed
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def test_a_device_that_fails_when_it_is_tried_again_is_named_in_its_own_words(
    stage: Stage,
) -> None:
    stage.begin()
    stage.start("broken-device")

    assert stage.hears(WorkersFailed) == WorkersFailed(
        node="n1",
        launch=0,
        reason="device 3: CUDA error: uncorrectable ECC error encountered",
        device_failed=True,
        torch="2.4.0",
    )
    assert stage.kinds().count("WorkersStarting") == 1


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
