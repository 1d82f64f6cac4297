# SPDX-License-Identifier: Apache-2.0
"""Work that is shared out unevenly: stages with more to compute, batches with more in them.

Nothing is wrong with a rank that has more to do, or with its node. Stages are uneven where all
ranks of a role take longer than the other roles do. Data is uneven where those that take longer
have more tokens; where tokens are not told, where the parts of one replica of the model, which
share nothing but their data, are slower together, and not the same replica all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, median_low

import msgspec

from slurm_health.training.diagnosis.stragglers import SLOWER, WINDOWS, RankWindow, Slower
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

STAGES, DATA = "uneven-stages", "uneven-data"
_FEWEST_REPLICAS = 3
_FEWEST_SLOWEST = 2  # replicas that were the slowest in turn: a slow machine stays the same one
_NOT_SHARED = 0.25  # of the variance between ranks of a role: at most so much within a replica


class Uneven(msgspec.Struct, frozen=True, kw_only=True):
    """What is uneven, by how much, and what shows it.

    Args:
        name: `uneven-stages` or `uneven-data`.
        roles: with the most to compute; none where no role is told.
        times: how many times as long as the others they take.
        ranks: that have the most to compute.
        one_node: they are all on one node, which may be the reason.
        evidence: figures in words.
    """

    name: str
    roles: tuple[str, ...] = ()
    times: float
    ranks: tuple[int, ...] = ()
    one_node: bool = False
    evidence: str = ""


class Unevenness:
    """Says once what is uneven, and again when it was not in between."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def newly(
        self, windows: Sequence[RankWindow], crowd: Sequence[Slower], nodes: Mapping[int, str]
    ) -> list[Uneven]:
        """Return what is uneven in all of the latest windows, and was not said.

        `crowd` are ranks that are slower and too many to be held slow; `nodes` where each rank is.
        """
        if len(windows) < WINDOWS:
            return []
        stages = _of_roles(windows) or _of_crowd(crowd)
        data = _by_tokens(windows) or _by_replica(windows)
        found = [each for each in (stages, data) if each]
        new = [each for each in found if each.name not in self._named]
        self._named = {each.name for each in found}
        return [
            msgspec.structs.replace(each, one_node=len({nodes.get(r) for r in each.ranks}) == 1)
            for each in new
        ]


def _of_roles(windows: Sequence[RankWindow]) -> Uneven | None:
    """Return the roles of which each rank takes longer than is usual for the other roles."""
    times: dict[str, list[float]] = {}
    for window in windows:
        for role in window.usual:
            others = [each.own_ms for other, each in window.usual.items() if other != role]
            mine = [window.spent[rank].own_ms for rank in _with(role, window)]
            if others and len(mine) > 1 and min(mine) >= SLOWER * median_low(others):
                times.setdefault(role, []).append(median(mine) / median_low(others))
    heavy = {role: median(each) for role, each in times.items() if len(each) == len(windows)}
    if not heavy:
        return None
    latest = windows[-1]
    return Uneven(
        name=STAGES,
        roles=tuple(sorted(heavy)),
        times=max(heavy.values()),
        ranks=tuple(rank for role in sorted(heavy) for rank in _with(role, latest)),
        evidence="a rank takes by itself, per step: "
        + "; ".join(f"{role} {each.own_ms:.0f} ms" for role, each in sorted(latest.usual.items())),
    )


def _with(role: str, window: RankWindow) -> list[int]:
    return [rank for rank, each in window.roles.items() if each == role]


def _of_crowd(crowd: Sequence[Slower]) -> Uneven | None:
    if not crowd:
        return None
    times = median(each.ratio for each in crowd)
    return Uneven(
        name=STAGES,
        times=times,
        ranks=tuple(each.rank for each in crowd),
        evidence=f"{len(crowd)} ranks take {times:.2f} times the median of all; no roles are known",
    )


def _by_tokens(windows: Sequence[RankWindow]) -> Uneven | None:
    """Return that in each window some rank takes longer, and has as many more tokens."""
    most: list[tuple[float, float, int]] = []
    for window in windows:
        more = []
        for rank, own in window.spent.items():
            usual = window.usual[window.roles[rank]]
            longer = usual.own_ms > 0 and own.own_ms >= SLOWER * usual.own_ms
            if longer and own.times_tokens(usual) >= SLOWER and not own.is_slower(usual):
                more.append((own.own_ms / usual.own_ms, own.times_tokens(usual), rank))
        if not more:
            return None
        most.append(max(more))
    times, tokens = median(each[0] for each in most), median(each[1] for each in most)
    return Uneven(
        name=DATA,
        times=times,
        ranks=tuple(sorted({rank for _, _, rank in most})),
        evidence=f"the rank that takes longest has {tokens:.2f} times the usual tokens and takes"
        f" {times:.2f} times the usual time",
    )


def _by_replica(windows: Sequence[RankWindow]) -> Uneven | None:
    """Return that the parts of a replica are slower together, another replica's at another time."""
    slowest: list[tuple[float, int]] = []
    within = between = 0.0
    for window in windows:
        ratios = _ratios_by_replica(window)
        if len(ratios) < _FEWEST_REPLICAS:
            return None
        slowest.append(max((fmean(each), replica) for replica, each in ratios.items()))
        within += _squares((ratio - fmean(each)) for each in ratios.values() for ratio in each)
        between += _squares((ratio - 1.0) for each in ratios.values() for ratio in each)
    times = median(ratio for ratio, _ in slowest)
    in_turn = len({replica for _, replica in slowest})
    if times < SLOWER or in_turn < _FEWEST_SLOWEST or within > _NOT_SHARED * between:
        return None
    last = windows[-1].replicas
    return Uneven(
        name=DATA,
        times=times,
        ranks=tuple(rank for rank, replica in last.items() if replica == slowest[-1][1]),
        evidence=f"the slowest replica of the model takes {times:.2f} times the usual time, all of"
        f" its parts alike, and in {len(slowest)} windows that was one of {in_turn} replicas",
    )


def _ratios_by_replica(window: RankWindow) -> dict[int, list[float]]:
    """Return the times of what is usual for its role that each rank takes, where roles differ."""
    ratios: dict[int, dict[str, list[float]]] = {}
    for rank, replica in window.replicas.items():
        usual = window.usual_of(rank)
        if usual is not None and replica >= 0:
            ratio = window.spent[rank].own_ms / usual.own_ms
            ratios.setdefault(replica, {}).setdefault(window.roles[rank], []).append(ratio)
    return {
        replica: [ratio for each in by_role.values() for ratio in each]
        for replica, by_role in ratios.items()
        if len(by_role) > 1
    }


def _squares(numbers: Iterable[float]) -> float:
    return sum(each * each for each in numbers)


def observe_uneven(data: DataManager) -> Inference | None:
    """Return what is uneven as an inference that is nobody's fault and no node's."""
    uneven = data.get(Uneven)
    if uneven is None:
        return None
    if uneven.name == DATA:
        return _inference(
            uneven,
            "batches are uneven: ranks with the same part of the model have more to compute in"
            " turn, as with longer sequences",
            Sureness.LIKELY,
            "sort or pack sequences so that each rank has as much to compute (attention grows with"
            " the square of a sequence's length)",
        )
    if not uneven.roles:
        return _inference(
            uneven,
            f"{len(uneven.ranks)} ranks take {uneven.times:.2f} times as long as the others, as"
            " with stages that have more to compute",
            Sureness.POSSIBLE,
            "say with heartbeat.role(...) which ranks do the same, so that these are compared",
        )
    return _inference(
        uneven,
        f"{', '.join(uneven.roles)} takes {uneven.times:.2f} times as long as the other roles: it"
        " has more to compute" + (", or its only node is slow" if uneven.one_node else ""),
        Sureness.POSSIBLE if uneven.one_node else Sureness.LIKELY,
        "give that stage fewer layers, or count the embedding and the loss as layers",
    )


def _inference(uneven: Uneven, description: str, sureness: Sureness, advice: str) -> Inference:
    return Inference(
        name=uneven.name,
        description=description,
        attribution=Attribution.UNDECIDED if sureness is Sureness.POSSIBLE else Attribution.USER,
        sureness=sureness,
        evidence=(uneven.evidence,),
        advice=advice,
    )
