# SPDX-License-Identifier: Apache-2.0
"""Simulated hours of trainings without a heartbeat: their output, and what their processes do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.training.diagnosis.by_output import OutputProgress
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.seen import Standstill
from slurm_health.training.diagnosis.watched import Looked, RankNow, Watched

LOOK_S = 20.0
WINDOW_S = 15.0
RANKS = 4
NODES = [f"n{rank}" for rank in range(RANKS)]


@dataclass
class Job:
    """What a job writes until a time, and the share of a core that its ranks use then."""

    written: Callable[[float, float], str]
    busy: Callable[[float], float] = lambda _: 0.0

    def ranks(self, now_s: float) -> list[RankNow]:
        used_s = sum(self.busy(float(second)) for second in range(int(now_s)))
        return [RankNow("0", rank, 100 + rank, "S", used_s, 0) for rank in range(RANKS)]


Found = tuple[float, Standstill]


def watched_for(job: Job, until_s: float) -> tuple[list[Found], list[float]]:
    """Watch a job; return when it was said to hang, and for how long by when it went on."""
    progress = OutputProgress()
    hangs: list[Found] = []
    over: list[float] = []
    now_s = 1000.0
    while now_s < until_s:
        progress.take("out", job.written(now_s - LOOK_S, now_s), now_s)
        stalled_s = progress.goes_on(now_s)
        over += [] if stalled_s is None else [stalled_s]
        if progress.suspect(now_s):
            judged = judge(progress, job, now_s)
            hangs += [] if isinstance(judged, str) else [(now_s, judged[0])]
        now_s += LOOK_S
    return hangs, over


def judge(
    progress: OutputProgress, job: Job, now_s: float
) -> tuple[Standstill, FlightRecords] | str:
    before = job.ranks(now_s)
    watched = Watched(NODES)
    for rank, node in zip(job.ranks(now_s + WINDOW_S), NODES, strict=True):
        watched.hear(node, [rank], now_s + WINDOW_S)
    looked = Looked(before={("0", each.rank): each for each in before}, looks={})
    return progress.judge(watched, looked, NODES, window_s=WINDOW_S, now_s=now_s + WINDOW_S)


def steps_at(times_s: Sequence[float]) -> Callable[[float, float], str]:
    def written(after_s: float, until_s: float) -> str:
        return "".join(
            f"step {number} loss 0.5\n"
            for number, at_s in enumerate(times_s)
            if after_s < at_s <= until_s
        )

    return written


def uneven(
    seed: int, until_s: float, step_s: float, pause_s: float = 0.0, every: int = 100
) -> list[float]:
    dice = random.Random(seed)
    times: list[float] = []
    at_s = 1000.0
    while at_s < until_s:
        pause = pause_s * dice.uniform(0.5, 1.0) if len(times) % every == every - 1 else 0.0
        at_s += step_s * dice.lognormvariate(0.0, 0.5) + pause
        times.append(at_s)
    return times


@pytest.mark.parametrize("step_s", [0.2, 1.0, 7.0, 60.0])
def test_output_that_ends_while_no_process_works_is_a_hang_and_said_once(step_s: float) -> None:
    times = uneven(1, 1000.0 + 100 * step_s + 600.0, step_s)
    end_s = times[-1]
    ((said_s, standstill),), over = watched_for(Job(steps_at(times)), end_s + 7200.0)

    assert 180.0 <= said_s - end_s <= 260.0 + 30 * step_s
    assert standstill.stalled_s >= standstill.allowance_s >= 200.0
    assert standstill.step == len(times) - 1
    assert over == []


def test_a_job_whose_processes_work_is_not_said_to_hang() -> None:
    """It may evaluate, or spin in a collective: that cannot be told from outside."""
    times = uneven(1, 3000.0, 1.0)

    assert watched_for(Job(steps_at(times), busy=lambda _: 0.3), 6000.0) == ([], [])


def test_a_hang_that_is_over_is_said_to_be_over() -> None:
    times = uneven(1, 2000.0, 1.0)
    later = uneven(2, 5000.0, 1.0)
    times += [each + 2000.0 for each in later]
    hangs, over = watched_for(Job(steps_at(times)), 6000.0)

    assert len(hangs) == len(over) == 1
    assert 900.0 < over[0] < 1100.0


def test_pauses_that_came_before_are_no_hang() -> None:
    times = uneven(3, 40000.0, 1.0, pause_s=110.0)

    assert watched_for(Job(steps_at(times)), 39000.0)[0] == []


@pytest.mark.parametrize("text", ["", "loading\n", "x" * 5000])
def test_a_job_whose_output_shows_no_steps_is_never_looked_at(text: str) -> None:
    job = Job(lambda after_s, _: text if after_s < 1100 else "")

    assert watched_for(job, 20000.0) == ([], [])


def test_the_first_steps_may_take_half_an_hour() -> None:
    times = [1000.0 + number * 170.0 for number in range(7)]

    assert watched_for(Job(steps_at(times)), times[-1] + 1500.0) == ([], [])


def test_where_no_process_can_be_seen_nothing_is_said() -> None:
    progress = OutputProgress()
    for number in range(400):
        progress.take("out", f"step {number}\n", 1000.0 + number)
    looked = Looked(before={}, looks={})
    now_s = 3000.0

    assert progress.suspect(now_s)
    judged = progress.judge(Watched(NODES), looked, NODES, window_s=WINDOW_S, now_s=now_s)
    assert judged == "no process of the training can be seen"
    assert not progress.suspect(now_s + 30.0)


@given(
    seed=st.integers(0, 10**6),
    step_s=st.sampled_from([0.1, 1.0, 3.0, 20.0, 600.0]),
    every=st.integers(20, 400),
)
@settings(max_examples=30, deadline=None)
def test_hours_of_healthy_steps_with_checkpoints_that_are_written_have_no_hang(
    seed: int, step_s: float, every: int
) -> None:
    until_s = 1000.0 + max(6 * 3600.0, 60 * step_s)
    times = uneven(seed, until_s, step_s, pause_s=1200.0, every=every)

    # Whoever writes a checkpoint, or evaluates, can be seen to.
    assert watched_for(Job(steps_at(times), busy=lambda _: 0.2), until_s - 700.0)[0] == []
