# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slower than those with the same work, by the time that is theirs alone.

What a rank has to do depends on its role, such as its stage of a pipeline, and on its tokens, where
heartbeats tell them; what is uneven of that is `uneven`'s to say, and makes no rank slow.

Why one is slower: it gets no processor, waits for its data, or has more to compute, whichever takes
the most of the time that it has over the others. A rank whose time nothing explains is called slow,
and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

from slurm_health.records.script_records import SLOWER_RANK
from slurm_health.training.diagnosis.samples import RankSample
from slurm_health.training.framework import DataManager, Inference, Sureness

# Three ranks at least: of two that differ either may be the slow one.
FEWEST_RANKS = 3
SLOWER = 1.10  # than the median of the ranks with its role, in each of the windows
# Where no role is known: so many slower ranks have another role, rather than a fault each.
_CROWD, _CROWD_SHARE = 2, 1 / 4
WINDOWS = 5
FEWEST_STEPS = 3  # in a window
# Of the time that a rank has over the others: what takes so much of it is why.
_MOST = 0.5


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank spends a step, in ms: by itself, and of it and beside it as a `RankSample` has it.

    `tokens` are those of a step.
    """

    own_ms: float = 0.0
    loading_ms: float = 0.0
    ran_ms: float = 0.0
    unserved_ms: float = 0.0
    throttled_ms: float = 0.0
    tokens: float = 0.0

    def is_slower(self, usual: Spent) -> bool:
        """Tell whether it takes longer than is usual, also for as many tokens."""
        return self.own_ms >= SLOWER * usual.own_ms * max(1.0, self.times_tokens(usual))

    def times_tokens(self, usual: Spent) -> float:
        """Return how many times the usual tokens it has, 1 where either does not tell them."""
        return self.tokens / usual.tokens if self.tokens and usual.tokens else 1.0


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """What each rank spent on a step in a window of time, with its role and its replica.

    `usual` is the median of each role; `judged` has the roles of which there are enough ranks.
    """

    spent: Mapping[int, Spent]
    roles: Mapping[int, str]
    replicas: Mapping[int, int]
    usual: Mapping[str, Spent]
    judged: frozenset[str]

    def usual_of(self, rank: int) -> Spent | None:
        """Return what is usual for a rank, None where too few do the same."""
        role = self.roles.get(rank)
        return self.usual[role] if role in self.judged else None


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A rank that was slower in all of the latest windows, and what is usual, per step."""

    rank: int
    ratio: float
    spent: Spent
    usual: Spent


class Stragglers:
    """Compares ranks window by window; says once who is slower, and once when that is over."""

    def __init__(self) -> None:
        self._before: Mapping[int, RankSample] = {}
        self.windows: deque[RankWindow] = deque(maxlen=WINDOWS)
        self.crowd: tuple[Slower, ...] = ()  # slower, and too many to be held slow
        self._named: set[int] = set()

    def window(self, now: Mapping[int, RankSample]) -> list[Slower]:
        """Close a window with what the ranks have by now; return who is newly known as slower."""
        if any(self._too_few(rank, time) for rank, time in now.items()):
            return []  # too short a window for these steps: it goes on
        spent = {rank: took for rank, time in now.items() if (took := self._spent(rank, time))}
        self._before = dict(now)
        if len(spent) < FEWEST_RANKS:
            self.windows.clear()
            return []
        self.windows.append(_window(spent, now))
        slower = [each for rank in spent if (each := self._slower(rank))]
        alike = not any(now[rank].role for rank in spent)
        crowd = alike and len(slower) >= max(_CROWD, _CROWD_SHARE * len(spent))
        self.crowd, slower = (tuple(slower), []) if crowd else ((), slower)
        new = [each for each in slower if each.rank not in self._named]
        self._named = {each.rank for each in slower}
        return new

    def _too_few(self, rank: int, time: RankSample) -> bool:
        before = self._before.get(rank)
        if before is None or not time.own_steps:
            return False
        return 0 <= time.own_steps - before.own_steps < FEWEST_STEPS

    def _spent(self, rank: int, time: RankSample) -> Spent | None:
        before = self._before.get(rank)
        if before is None or time.own_steps <= before.own_steps or time.own_s <= before.own_s:
            return None
        ms = 1e3 / (time.own_steps - before.own_steps)
        return Spent(
            own_ms=ms * (time.own_s - before.own_s),
            loading_ms=ms * (time.loading_s - before.loading_s),
            ran_ms=ms * (time.ran_s - before.ran_s),
            unserved_ms=ms * (time.unserved_s - before.unserved_s),
            throttled_ms=ms * (time.throttled_s - before.throttled_s),
            tokens=(time.tokens - before.tokens) / (time.own_steps - before.own_steps),
        )

    def _slower(self, rank: int) -> Slower | None:
        seen = [
            (window.spent[rank], usual)
            for window in self.windows
            if rank in window.spent and (usual := window.usual_of(rank))
        ]
        if len(seen) < WINDOWS or not all(own.is_slower(usual) for own, usual in seen):
            return None
        return Slower(
            rank=rank,
            ratio=median(own.own_ms / usual.own_ms for own, usual in seen),
            spent=_middle([own for own, _ in seen]),
            usual=_middle([usual for _, usual in seen]),
        )


def _window(spent: Mapping[int, Spent], now: Mapping[int, RankSample]) -> RankWindow:
    by_role: dict[str, list[Spent]] = {}
    for rank, each in spent.items():
        by_role.setdefault(now[rank].role, []).append(each)
    return RankWindow(
        spent=spent,
        roles={rank: now[rank].role for rank in spent},
        replicas={rank: now[rank].replica for rank in spent},
        usual={role: _middle(every) for role, every in by_role.items()},
        judged=frozenset(role for role, every in by_role.items() if len(every) >= FEWEST_RANKS),
    )


def _middle(spent: Iterable[Spent]) -> Spent:
    every = list(spent)
    return Spent(
        own_ms=median(each.own_ms for each in every),
        loading_ms=median(each.loading_ms for each in every),
        ran_ms=median(each.ran_ms for each in every),
        unserved_ms=median(each.unserved_ms for each in every),
        throttled_ms=median(each.throttled_ms for each in every),
        tokens=median(each.tokens for each in every),
    )


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is slower than the others, and how it and they spend a step.

    `tells_loading`: it says how long it waits for its data.
    """

    rank: int
    node: str
    spent: Spent
    usual: Spent
    tells_loading: bool = False

    @property
    def over_ms(self) -> float:
        """What it has over the others, per step."""
        return self.spent.own_ms - self.usual.own_ms

    @property
    def lacks_processor(self) -> bool:
        """Whether it mostly waits for a processor; then it is late in all that it does."""
        return self._takes_most(self.spent.unserved_ms - self.usual.unserved_ms)

    @property
    def waits_for_data(self) -> bool:
        """Whether it mostly waits for its data."""
        return self._takes_most(self.spent.loading_ms - self.usual.loading_ms)

    @property
    def computes_longer(self) -> bool:
        """Whether its main thread mostly runs for longer."""
        return self._takes_most(self.spent.ran_ms - self.usual.ran_ms)

    def _takes_most(self, ms: float) -> bool:
        return self.over_ms > 0 and ms >= _MOST * self.over_ms


def observe_slow_rank(data: DataManager) -> Inference | None:
    """Return the symptom of a rank that is slower than the others, None where none is."""
    slow = data.get(SlowRank)
    if slow is None:
        return None
    unknown = "a device, a filesystem or a library"
    if not slow.tells_loading:
        unknown = "its data, a device, a filesystem or a library"
    return _inference(
        slow,
        SLOWER_RANK,
        f"is slower than the others and waits for something ({unknown}); what for is not known",
        Sureness.POSSIBLE,
        advice=f"check {slow.node} before the next start (slurm-health check"
        " --straggler-detection)"
        + ("" if slow.tells_loading else "; heartbeat.loading(loader) would tell waits for data"),
    )


def no_processor(_: Inference, data: DataManager) -> Inference | None:
    """It is ready to run and has no processor: a limit holds it back, or others run on its own."""
    slow = data.get(SlowRank)
    if slow is None or not slow.lacks_processor:
        return None
    limited = slow.spent.throttled_ms >= slow.usual.throttled_ms + _MOST * slow.over_ms
    why = "a CPU limit holds it back" if limited else "others use its processors"
    at = f"its cgroup was held back by its CPU limit, {slow.spent.throttled_ms:.0f} ms per step"
    return _inference(
        slow,
        "no-processor",
        f"is slow because it waits for a processor: {why}",
        Sureness.LIKELY,
        f"its main thread was ready to run and did not for {slow.spent.unserved_ms:.0f} ms"
        f" per step, {slow.usual.unserved_ms:.0f} ms usual",
        *([at] if limited else []),
        advice="look at the limit (cpu.max, or cpu.cfs_quota_us) of the cgroups that it is"
        f" in on {slow.node}, and at what Slurm gave the job (--cpus-per-task)"
        if limited
        else f"look at what runs on {slow.node} (top), and whether its threads and the data"
        " loader's workers are more than its processors (--cpus-per-task, OMP_NUM_THREADS)",
    )


def slow_data(_: Inference, data: DataManager) -> Inference | None:
    """By its own word it waits for its data loader: a filesystem, or what is done to each batch."""
    slow = data.get(SlowRank)
    if slow is None or not slow.waits_for_data or slow.lacks_processor:
        return None
    return _inference(
        slow,
        "slow-data-loader",
        "is slow because it waits for its data loader",
        Sureness.LIKELY,
        f"it waited {slow.spent.loading_ms:.0f} ms per step for its data,"
        f" {slow.usual.loading_ms:.0f} ms usual",
        advice=f"look at the filesystem of its data as {slow.node} sees it; more workers"
        " of the loader may hide the wait (num_workers, prefetch_factor)",
    )


def computes_longer(_: Inference, data: DataManager) -> Inference | None:
    """It runs for longer than the others: a slower processor or device, or more to do."""
    slow = data.get(SlowRank)
    if slow is None or not slow.computes_longer or slow.lacks_processor or slow.waits_for_data:
        return None
    return _inference(
        slow,
        "computes-longer",
        "is slow because it computes for longer: a slower processor or device, or more to"
        " do than the others",
        Sureness.LIKELY,
        f"its main thread ran for {slow.spent.ran_ms:.0f} ms per step,"
        f" {slow.usual.ran_ms:.0f} ms usual",
        advice=f"check {slow.node} before the next start (slurm-health check"
        " --straggler-detection); check whether this rank has longer batches",
    )


def _inference(
    slow: SlowRank, name: str, description: str, sureness: Sureness, *evidence: str, advice: str
) -> Inference:
    """Return an inference about the rank; that it is slow is no fault of its node's."""
    own_ms, usual_ms = slow.spent.own_ms, slow.usual.own_ms
    return Inference(
        name=name,
        description=f"rank {slow.rank} on {slow.node} {description}",
        sureness=sureness,
        nodes=(slow.node,),
        ranks=(slow.rank,),
        evidence=(
            f"it takes {own_ms:.0f} ms of its own per step, {usual_ms:.0f} ms usual",
            *evidence,
        ),
        advice=advice,
    )
