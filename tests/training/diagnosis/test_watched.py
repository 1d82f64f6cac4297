# SPDX-License-Identifier: Apache-2.0
"""Simulated hours of trainings, as the monitors of their nodes would tell them."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import Frame
from slurm_health.training.diagnosis.stragglers import OwnTime, Stragglers
from slurm_health.training.diagnosis.watched import Looked, WatchedPrograms

INTERVAL_S = 10.0
RANKS = 4
NODES = [f"n{rank}" for rank in range(RANKS)]
COLLECTIVE = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "barrier"),)
LOADER = (Frame("/x/torch/utils/data/dataloader.py", 1, "__next__"),)


class Training:
    """Steps at simulated times; `pauses` says how long the pause behind a step is."""

    def __init__(self, step_s: Callable[[int], float], until_s: float) -> None:
        self.ends: list[float] = []
        at_s, step = 60.0, 0
        while at_s < until_s:
            at_s += step_s(step)
            self.ends.append(at_s)
            step += 1

        gaps = [after - before for before, after in itertools.pairwise(self.ends[2:])]
        self._longest_s = [0.0, 0.0, 0.0, *itertools.accumulate(gaps, max)]

    def now(
        self, rank: int, now_s: float, *, cpu_s: float = 0.0, unserved_s: float = 0.0
    ) -> RankNow | None:
        done = bisect.bisect_right(self.ends, now_s)
        if not done:
            return None
        last_s = self.ends[done - 1]
        return RankNow(
            program="0",
            rank=rank,
            pid=100 + rank,
            state="S",
            cpu_s=cpu_s,
            io_bytes=0,
            step=done - 1,
            steps=done,
            age_s=now_s - last_s,
            typical_s=(last_s - self.ends[2]) / max(1, done - 3) if done > 2 else 0.0,
            longest_s=self._longest_s[done - 1],
            unserved_s=unserved_s,
        )


def tell(
    watched: WatchedPrograms,
    training: Training,
    now_s: float,
    cpu_s: float = 0.0,
    unserved_s: float = 0.0,
) -> None:
    for rank, node in enumerate(NODES):
        now = training.now(rank, now_s, cpu_s=cpu_s, unserved_s=unserved_s)
        watched.hear(node, [now] if now else [], now_s)


def suspected(
    training: Training, until_s: float, cpu_share: float = 0.0, unserved_share: float = 0.0
) -> list[float]:
    """Return when a training was said to hang, with everybody in a collective at each look."""
    watched = WatchedPrograms(NODES)
    found = []
    now_s = 0.0
    while now_s < until_s:
        now_s += INTERVAL_S
        tell(watched, training, now_s, cpu_share * now_s, unserved_share * now_s)
        program = watched.suspect(now_s)
        if program is not None:
            before = {("0", rank): last.now for rank, last in program.ranks.items()}
            now_s += 7.0
            tell(watched, training, now_s, cpu_share * now_s, unserved_share * now_s)
            stacks = {n: LOADER if n == 0 else COLLECTIVE for n in range(RANKS)}
            looks = {("0", n): RankLook("0", n, True, "", stack) for n, stack in stacks.items()}
            looked = Looked(before=before, looks=looks)
            judged = watched.judge(program, looked, window_s=7.0, now_s=now_s)
            if not isinstance(judged, str):
                found.append(now_s)
    return found


def uneven(seed: int, pause_s: float, every: int, step_s: float = 1.0) -> Callable[[int], float]:
    dice = random.Random(seed)

    def step(number: int) -> float:
        pause = pause_s if number and number % every == 0 else 0.0
        return step_s * dice.lognormvariate(0.0, 0.5) + pause

    return step


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_uneven_steps_with_short_checkpoints_has_no_hang(seed: int) -> None:
    training = Training(uneven(seed, pause_s=15.0, every=300), 3600.0)

    assert suspected(training, 3500.0) == []


@given(
    seed=st.integers(0, 10**6),
    step_s=st.sampled_from([0.2, 1.0, 5.0, 60.0, 600.0]),
    every=st.integers(10, 500),
    pause_s=st.floats(0.0, 1500.0),
)
@settings(max_examples=20, deadline=None)
def test_hours_of_healthy_steps_and_checkpoints_that_a_rank_writes_have_no_hang(
    seed: int, step_s: float, every: int, pause_s: float
) -> None:
    until_s = max(4 * 3600.0, 40 * step_s)
    training = Training(uneven(seed, pause_s, every, step_s), until_s)

    assert suspected(training, until_s - 1600.0, cpu_share=0.2) == []


def test_steps_that_take_ten_minutes_are_no_hang() -> None:
    training = Training(uneven(2, pause_s=0.0, every=10, step_s=600.0), 20 * 3600.0)

    assert suspected(training, 19 * 3600.0) == []


def test_a_first_step_of_a_quarter_of_an_hour_is_no_hang() -> None:
    training = Training(lambda step: 900.0 if step < 2 else 1.0, 3600.0)

    assert suspected(training, 3500.0) == []


def test_ranks_whose_processors_others_have_do_not_hang_for_half_an_hour() -> None:
    training = Training(lambda _: 1.0, 300.0)

    (said,) = suspected(training, 3600.0, cpu_share=0.02, unserved_share=0.9)
    assert 1800.0 <= said - training.ends[-1] <= 2100.0


@pytest.mark.parametrize("at_s", [130.0, 333.0, 1001.0])
def test_a_standstill_of_steps_of_a_second_is_said_within_a_minute_and_once(at_s: float) -> None:
    training = Training(lambda _: 1.0, at_s)

    (said,) = suspected(training, at_s + 900.0)
    assert said - training.ends[-1] <= 60.0


def test_after_long_checkpoints_a_standstill_is_said_after_half_as_long_again() -> None:
    training = Training(uneven(3, pause_s=90.0, every=300), 2000.0)

    (said,) = suspected(training, 4000.0, cpu_share=0.0)[-1:]
    assert said - training.ends[-1] <= 200.0


def test_a_training_that_goes_on_is_said_to_and_may_hang_again() -> None:
    watched = WatchedPrograms(NODES)
    training = Training(lambda step: 400.0 if step == 100 else 1.0, 700.0)
    now_s, said, over = 0.0, 0, 0
    while now_s < 690.0:
        now_s += INTERVAL_S
        for rank, node in enumerate(NODES):
            now = training.now(rank, now_s)
            for program in watched.hear(node, [now] if now else [], now_s):
                program.hung_s = None
                over += 1
        program_ = watched.suspect(now_s)
        if program_ is not None:
            looks = {("0", n): RankLook("0", n, True, "", COLLECTIVE) for n in range(RANKS)}
            looked = Looked(before={}, looks=looks)
            said += not isinstance(watched.judge(program_, looked, window_s=7.0, now_s=now_s), str)

    assert (said, over) == (1, 1)


def test_scripts_one_after_another_each_have_a_pace_of_their_own() -> None:
    watched = WatchedPrograms(["n0"])
    first = RankNow("0", 0, 7, "S", 0.0, 0, 99, 100, 1.0, 1.0, 1.5)
    watched.hear("n0", [first], 100.0)
    second = RankNow("1", 0, 8, "S", 0.0, 0, 1, 2, 10.0, 0.0, 0.0)
    watched.hear("n0", [second], 200.0)

    assert list(watched.programs) == ["1"]
    assert watched.suspect(240.0) is None


@pytest.mark.parametrize("state", ["S", "T"])
def test_in_its_first_steps_only_what_no_start_explains_is_a_hang(state: str) -> None:
    watched = WatchedPrograms(NODES)
    for rank, node in enumerate(NODES):
        now = RankNow("0", rank, 7, state if rank == 1 else "S", 0.0, 0, 1, 2, 65.0, 0.0, 0.0)
        watched.hear(node, [now], 100.0)
    program = watched.suspect(100.0)
    assert program is not None
    before = {("0", rank): last.now for rank, last in program.ranks.items()}
    looks = {("0", rank): RankLook("0", rank, True, "", COLLECTIVE) for rank in range(RANKS)}
    judged = watched.judge(program, Looked(before=before, looks=looks), window_s=7.0, now_s=107.0)

    assert isinstance(judged, str) == (state == "S")
    assert isinstance(judged, str) or judged[0].stalled_s == 72.0


# --- stragglers -----------------------------------------------------------------------------------


def windows(ratios: list[list[float]]) -> list[list[tuple[int, float]]]:
    """Return who is named behind each window; ratios by window and rank, 60 steps of 1 s each."""
    stragglers = Stragglers()
    seconds = [0.0] * len(ratios[0])
    stragglers.window({rank: OwnTime(seconds=0.0, steps=0) for rank in range(len(seconds))})
    named = []
    for number, window in enumerate(ratios, start=1):
        seconds = [before + 60 * ratio for before, ratio in zip(seconds, window, strict=True)]
        own = {r: OwnTime(seconds=each, steps=60 * number) for r, each in enumerate(seconds)}
        named.append([(each.rank, round(each.ratio, 2)) for each in stragglers.window(own)])
    return named


def test_a_rank_that_stays_slower_is_named_once_after_five_windows() -> None:
    assert windows([[1, 1, 1.2, 1]] * 8) == [[], [], [], [], [(2, 1.2)], [], [], []]


def test_a_rank_that_is_slower_now_and_then_is_not_named() -> None:
    dice = random.Random(3)
    hours = [[dice.lognormvariate(0, 0.04) for _ in range(8)] for _ in range(600)]

    assert not any(windows(hours))
    assert not any(windows([[1, 1, 2.0 if n % 5 else 1.0] for n in range(30)]))


def test_of_two_ranks_nobody_is_the_slower_one() -> None:
    assert not any(windows([[1, 2.0]] * 10))
