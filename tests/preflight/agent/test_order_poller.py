# SPDX-License-Identifier: Apache-2.0
"""When an agent looks for the master's orders, and when it gives the master up."""

from __future__ import annotations

import os
import subprocess

import pytest

from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.order_poller import JournalNotVisible
from slurm_health.preflight.orders import Ringers, ring_all
from slurm_health.records.records import (
    AgentEnded,
    MasterWaits,
    NodeReported,
    VerdictReached,
    WorkersReady,
)
from tests.support.agent_stage import Stage
from tests.support.journals import Clock


def test_it_leaves_a_master_that_is_silent_and_none_that_says_it_waits(stage: Stage) -> None:
    stage.begin()
    clock = Clock(0.0)

    def passing() -> float:
        clock.now_s += 5.0
        if clock.now_s % 50 == 0 and clock.now_s <= 4000:
            stage.says(MasterWaits(reason="a node that takes an hour"))
        return clock.now_s

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=passing).run()

    assert stage.hears(AgentEnded).reason == "the master has been silent for 60 s"
    assert 4060 < clock.now_s < 4200  # it looks at the clock a few times each time round


def test_what_held_up_the_agent_itself_is_no_silence_of_the_master(stage: Stage) -> None:
    stage.begin()
    clock = Clock(0.0)

    def passing() -> float:
        clock.now_s += 1000.0 if clock.now_s == 30.0 else 5.0  # its filesystem hung
        return clock.now_s

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=passing).run()

    assert 1090 < clock.now_s < 1150


def test_an_agent_that_hears_the_bell_looks_at_once_and_rings_when_it_has_written(
    stage: Stage,
) -> None:
    stage.begin()
    agent = stage.start("well", poll_s=50.0, bell=subprocess.PIPE)  # longer than `hears` waits
    assert agent.stdin is not None
    assert agent.stdout is not None
    stage.hears(WorkersReady)

    for index in range(2):
        stage.round(index)
        ring_all(agent.stdin.fileno())
        stage.hears(NodeReported, index + 1)
    stage.says(VerdictReached(nodes=[]))
    ring_all(agent.stdin.fileno())
    agent.wait(timeout=20)

    with agent.stdin, agent.stdout:
        rings = Ringers().rung(agent.stdout.read())
    assert set(rings) == {"n1"}
    assert len(rings) >= 4  # it is there, its workers are ready, and a report of each round


@pytest.mark.parametrize("run_id", ["of another run", None])
def test_a_journal_that_does_not_show_this_run_is_given_up_in_time(
    stage: Stage, run_id: str | None
) -> None:
    if run_id is not None:
        stage.begin(run_id)
    clock = Clock(0.0)

    def hurry() -> float:
        clock.now_s += 5.0
        return clock.now_s

    with pytest.raises(JournalNotVisible, match=r"orders\.txt"):
        Agent(stage.settings(), dict(os.environ), monotonic=hurry).run()

    assert stage.records() == []
