# SPDX-License-Identifier: Apache-2.0
"""Steps that take longer than before, for all ranks, and not by what ranks compute themselves.

Where ranks then wait for each other, the operator here says over which node's link: that at which
all slow connections meet. A connection's speed is what it sent by the time in which it had
something to send and its peer took it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import listed
from slurm_health.training.framework import DataManager, Inference, Sureness

USUAL_WINDOWS = 3  # at least so many, before it is known what is usual
SLOW_WINDOWS = 3  # in a row; a checkpoint or an evaluation is over by then
LONGER = 0.3  # of a usual step, in each of these
MOST = 0.5  # of what is longer
FEWEST_STEPS = 3  # in a window
_KEPT = 60
# Connections of well nodes differ by the pace of who reads; a link that slows a training down by
# itself differs by more.
_SLOW, _FAST = 1 / 4, 1 / 2
TICK_S = 0.01  # the kernel counts time in ticks of 1 to 10 ms
FEWEST_BYTES = 1 << 20  # sent while it was looked at: of less, its speed says little

Sent = Mapping[str, Mapping[str, tuple[int, float]]]
"""By node and address of the peer: bytes sent so far, and seconds that this took."""


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """A rank so far: steps, when the latest ended, seconds of its own in so many steps."""

    steps: int
    last_s: float
    own_s: float = 0.0
    own_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """A step in a window of time, in ms: all of it, and the most that a rank took by itself."""

    step_ms: float
    own_ms: float = 0.0  # 0 where ranks do not tell it

    @property
    def waits_ms(self) -> float:
        """What is no rank's own: communication."""
        return self.step_ms - self.own_ms


@dataclass(frozen=True, kw_only=True)
class Longer:
    """What a step took in the latest windows, and before."""

    now: StepWindow
    usual: StepWindow


class SlowSteps:
    """Compares the steps of one program with its own earlier ones, window by window."""

    def __init__(self) -> None:
        self._before: Mapping[int, RankSteps] = {}
        self._windows: deque[StepWindow] = deque(maxlen=_KEPT)
        self._named = False

    def window(self, now: Mapping[int, RankSteps]) -> Longer | None:
        """Close a window; return by how much steps take longer, once until that is over."""
        before = {rank: self._before[rank] for rank in now if rank in self._before}
        made = [now[rank].steps - each.steps for rank, each in before.items()]
        if not made or len(made) < len(now) or min(made) < 0:  # ranks that are new, or start again
            self._before = dict(now)
            return None
        if min(made) < FEWEST_STEPS:
            return None  # too short a window for these steps: it goes on
        self._windows.append(_window(before, now))
        self._before = dict(now)
        longer = self._longer()
        new = longer is not None and not self._named
        self._named = longer is not None
        return longer if new else None

    def _longer(self) -> Longer | None:
        windows = list(self._windows)
        earlier, latest = windows[:-SLOW_WINDOWS], windows[-SLOW_WINDOWS:]
        if len(earlier) < USUAL_WINDOWS:
            return None
        usual = _middle(earlier)
        if not all(_waits_longer(each, usual) for each in latest):
            return None
        return Longer(now=_middle(latest), usual=usual)


def _waits_longer(now: StepWindow, usual: StepWindow) -> bool:
    """Tell whether ranks wait much longer than is usual, and for most of what is longer.

    A rank that has no processor computes longer, and serves its connections late as well: the
    others wait, and those connections look slow.
    """
    longer_ms, waits_ms = now.step_ms - usual.step_ms, now.waits_ms - usual.waits_ms
    return waits_ms >= max(LONGER * usual.step_ms, MOST * longer_ms)


def _window(before: Mapping[int, RankSteps], now: Mapping[int, RankSteps]) -> StepWindow:
    step_ms, own_ms = [], [0.0]
    for rank, began in before.items():
        ended = now[rank]
        step_ms.append(1e3 * (ended.last_s - began.last_s) / (ended.steps - began.steps))
        if ended.own_steps > began.own_steps:
            own_s = ended.own_s - began.own_s
            own_ms.append(1e3 * own_s / (ended.own_steps - began.own_steps))
    return StepWindow(step_ms=median(step_ms), own_ms=max(own_ms))


def _middle(windows: list[StepWindow]) -> StepWindow:
    return StepWindow(
        step_ms=median(each.step_ms for each in windows),
        own_ms=median(each.own_ms for each in windows),
    )


class PathSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast the connections of the job from a node to another one were."""

    node: str
    peer: str
    mb_per_s: float

    @property
    def ends(self) -> frozenset[str]:
        """Both nodes."""
        return frozenset({self.node, self.peer})


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that take longer than they did, in ms; `own_ms` is the most that a rank computes.

    `own_ms` is 0 where ranks do not tell it. `speeds` are of connections between `nodes`.
    """

    step_ms: float
    usual_ms: float
    own_ms: float = 0.0
    nodes: tuple[str, ...] = ()
    speeds: tuple[PathSpeed, ...] = ()


def slow_paths(_: Inference, data: DataManager) -> Inference | None:
    """Some connections are many times slower than others, and lead to one node.

    It is the node where all slow connections meet, and no fast one.
    """
    slowdown = data.get(Slowdown)
    if slowdown is None or len(slowdown.speeds) < 2:
        return None
    fastest = max(each.mb_per_s for each in slowdown.speeds)
    slow = sorted(
        (each for each in slowdown.speeds if each.mb_per_s < _SLOW * fastest),
        key=lambda each: each.mb_per_s,
    )
    fast = [each for each in slowdown.speeds if each.mb_per_s >= _FAST * fastest]
    if not slow:
        return None
    nodes = frozenset.intersection(*(each.ends for each in slow))
    nodes -= frozenset[str]().union(*(each.ends for each in fast))
    one = len(nodes) == 1 and len({each.ends for each in slow}) > 1
    where = tuple(sorted(nodes)) if one else ()
    what = f"the network link of {listed(where)} is slow" if one else "the network is slow"
    own = f", {slowdown.own_ms:.0f} ms of it a rank's own" if slowdown.own_ms else ""
    return Inference(
        name="slow-network",
        description=f"{what}: ranks wait longer for each other than before",
        sureness=Sureness.LIKELY if one else Sureness.POSSIBLE,
        nodes=where,
        evidence=(
            f"a step takes {slowdown.step_ms:.0f} ms{own}; before, {slowdown.usual_ms:.0f} ms",
            *(_line(each) for each in slow[:MOST_LINES]),
            f"the fastest connection sends {fastest:.0f} MB/s",
        ),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def speeds_of(
    before: Sent, after: Sent, addresses: Mapping[str, str], nodes: Iterable[str]
) -> tuple[PathSpeed, ...]:
    """Return the speeds between two looks; `addresses` says whose an address is."""
    known = set(nodes)
    found = []
    for node, peers in after.items():
        sums: dict[str, tuple[float, float]] = {}
        for address, (sent, seconds) in peers.items():
            peer = addresses.get(address, "")
            was = before.get(node, {}).get(address)
            # Of a connection that was closed meanwhile, what it had sent is gone.
            if peer not in known or was is None or sent < was[0] or seconds < was[1]:
                continue
            so_far = sums.get(peer, (0.0, 0.0))
            sums[peer] = so_far[0] + sent - was[0], so_far[1] + seconds - was[1]
        found += [
            PathSpeed(node=node, peer=peer, mb_per_s=round(sent / max(seconds, TICK_S) / 1e6, 3))
            for peer, (sent, seconds) in sums.items()
            if sent >= FEWEST_BYTES
        ]
    return tuple(found)


def _line(path: PathSpeed) -> str:
    return f"{path.node} sends {path.mb_per_s:.1f} MB/s to {path.peer} while it sends"
