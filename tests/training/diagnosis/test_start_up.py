# SPDX-License-Identifier: Apache-2.0
"""Simulated starts of trainings: what ends the patience with one, and what does not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.pace import PATIENCE
from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import Frame, RankSeen, Standstill
from slurm_health.training.diagnosis.start_up import Stillness
from slurm_health.training.diagnosis.watched import Looked, WatchedPrograms

RANKS = 3
NODES = [f"n{rank}" for rank in range(RANKS)]
COLLECTIVE = (Frame("/x/torch/distributed/distributed_c10d.py", 1, "barrier"),)
OWN_CODE = (Frame("train.py", 7, "wait_for_file"),)
COMPILES = (Frame("/x/torch/_inductor/compile_fx.py", 1, "compile"),)
EVERY_S = 10.0


def ranks(at_s: float, **of_last: float) -> list[RankNow]:
    """Return all ranks, which do nothing but what the last one is said to."""
    found = [RankNow("0", rank, 70 + rank, "S", 9.0, 0, world=RANKS) for rank in range(RANKS)]
    found[-1] = msgspec.structs.replace(found[-1], **of_last)
    return found


def seen(**of_last: object) -> Standstill:
    each = [RankSeen(rank=n, node=NODES[n], pid=70 + n, stack=COLLECTIVE) for n in range(RANKS)]
    each[-1] = msgspec.structs.replace(each[-1], **of_last)
    return Standstill(
        stalled_s=500.0, allowance_s=60.0, step=2, nodes=tuple(NODES), ranks=tuple(each)
    )


def after(for_s: float, **of_last: Callable[[float], float]) -> tuple[Stillness, float]:
    """Return how still ranks were for so long, and the time; the last one's counters go on so."""
    stillness, now_s = Stillness(), 0.0
    while now_s <= for_s:
        told = {name: round(value(now_s), 3) for name, value in of_last.items()}
        stillness.take(ranks(now_s, **told), now_s)
        now_s += EVERY_S
    return stillness, now_s - EVERY_S


def left_s(of: tuple[Stillness, float], standstill: Standstill, world: int = RANKS) -> float:
    stillness, now_s = of
    return stillness.left_s(
        standstill, FlightRecords(), world=world, patience=PATIENCE, now_s=now_s
    )


@pytest.mark.parametrize(
    "moves",
    [
        {"ran_s": lambda at_s: 0.05 * at_s},
        {"wakes": lambda at_s: at_s},
        {"cpu_s": lambda at_s: 0.2 * at_s},  # of a child that compiles
        {"io_bytes": lambda at_s: (1 << 20) * at_s},
        {"steps": lambda at_s: at_s // 20},
    ],
    ids=lambda moves: next(iter(moves)),
)
def test_as_long_as_one_rank_moves_the_start_goes_on(
    moves: dict[str, Callable[[float], float]],
) -> None:
    assert left_s(after(3000.0, **moves), seen()) >= PATIENCE.quiet_s


def test_a_stillness_that_ended_by_itself_is_usual() -> None:
    until_s = 400.0
    of = after(500.0, cpu_s=lambda at_s: max(0.0, at_s - until_s + EVERY_S))
    stillness, now_s = of
    for _ in range(50):
        now_s += EVERY_S
        stillness.take(ranks(now_s, cpu_s=200.0), now_s)

    longest_s = until_s - 2 * EVERY_S
    assert left_s((stillness, now_s), seen()) > longest_s - 500.0
    assert left_s((stillness, now_s), seen()) > 0


@pytest.mark.parametrize(
    ("standstill", "world"),
    [(seen(), RANKS + 1), (seen(), 0), (seen(pid=0, gone=True), RANKS)],
    ids=["one was never seen", "how many is not told", "one has ended before"],
)
def test_where_a_rank_may_be_still_to_come_nothing_is_learnt(
    standstill: Standstill, world: int
) -> None:
    assert left_s(after(400.0), standstill, world) == PATIENCE.first_s - standstill.stalled_s


def test_data_that_comes_over_the_network_moves_a_start() -> None:
    of = after(500.0)
    stillness, now_s = of
    stillness.receive({"n1": 1000}, now_s)
    assert left_s(of, seen()) < 0
    stillness.receive({"n1": 1000 + (1 << 20)}, now_s + EVERY_S)

    assert left_s((stillness, now_s + EVERY_S), seen()) >= PATIENCE.quiet_s


def test_what_the_threads_of_nccl_use_while_a_gpu_waits_moves_nothing() -> None:
    stillness = Stillness()
    waits = seen(gpu_waits=True)
    for at_s in range(0, 400, 10):
        stillness.take(ranks(at_s, cpu_s=float(at_s)), float(at_s))
        left = left_s((stillness, float(at_s)), waits)

    assert left < 0


# --- as the monitors of all nodes tell it ---------------------------------------------------------


def hang_s(
    until_s: float,
    stack: tuple[Frame, ...] = COLLECTIVE,
    cpu_share: float = 0.0,
    suspended: tuple[float, float] = (0.0, 0.0),
) -> float | None:
    """Return when a training is said to hang that stands still in its second step."""
    watched = WatchedPrograms(NODES)
    now_s = 0.0
    while now_s < until_s:
        now_s += EVERY_S
        begin_s, for_s = suspended
        if begin_s <= now_s < begin_s + for_s:
            continue
        age_s = now_s - (for_s if now_s > begin_s else 0.0)
        all_now = [
            RankNow(
                "0", rank, 70 + rank, "S", cpu_share * now_s * (rank == 0), 0,
                step=1, steps=2, age_s=age_s, world=RANKS,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        for rank, node in enumerate(NODES):
            watched.hear(node, [all_now[rank]], now_s)
        program = watched.suspect(now_s)
        if program is None:
            continue
        before = {("0", each.rank): each for each in all_now}
        looks = {("0", rank): RankLook("0", rank, True, "", COLLECTIVE) for rank in range(RANKS)}
        looks["0", 0] = RankLook("0", 0, True, "", stack)
        for each in all_now:
            spent = cpu_share * EVERY_S * (each.rank == 0)
            now = msgspec.structs.replace(
                each, age_s=each.age_s + EVERY_S, cpu_s=each.cpu_s + spent
            )
            watched.hear(NODES[each.rank], [now], now_s + EVERY_S)
        now_s += EVERY_S
        looked = Looked(before=before, looks=looks)
        if not isinstance(watched.judge(program, looked, window_s=EVERY_S, now_s=now_s), str):
            return now_s
    return None


def test_ranks_that_all_wait_for_each_other_in_their_second_step_hang_within_minutes() -> None:
    told_s = hang_s(1000.0)

    assert told_s is not None
    assert PATIENCE.quiet_s <= told_s <= PATIENCE.quiet_s + 3 * EVERY_S


@pytest.mark.parametrize(
    ("stack", "cpu_share"), [(COMPILES, 1.0), (COMPILES, 0.1), (OWN_CODE, 0.1)]
)
def test_a_first_step_in_which_a_rank_works_for_minutes_is_no_hang(
    stack: tuple[Frame, ...], cpu_share: float
) -> None:
    assert hang_s(1700.0, stack, cpu_share) is None


def test_a_rank_in_code_of_its_own_in_the_second_step_is_told_of_in_a_quarter_of_an_hour() -> None:
    told_s = hang_s(1700.0, OWN_CODE)

    assert told_s is not None
    assert PATIENCE.alone_s <= told_s <= PATIENCE.alone_s + 13 * EVERY_S


def test_a_start_that_was_suspended_for_an_hour_is_no_hang() -> None:
    assert hang_s(3800.0, suspended=(50.0, 3650.0)) is None


def test_a_debugger_in_the_first_step_is_no_hang() -> None:
    prompt = (Frame("/usr/lib/python3/pdb.py", 1, "interaction"),)

    assert hang_s(3000.0, prompt) is None
