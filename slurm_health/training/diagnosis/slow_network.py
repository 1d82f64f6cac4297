# SPDX-License-Identifier: Apache-2.0
"""Communication that takes longer than before: over which node's link.

From `slower-steps`, the symptom, to the node at which all slow connections meet. A connection's
speed is what it sent by the time in which it had something to send and its peer took it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Inference, Sureness

# Connections of well nodes differ by the pace of who reads; a link that slows a training down by
# itself differs by more.
_SLOW, _FAST = 1 / 4, 1 / 2
TICK_S = 0.01  # the kernel counts time in ticks of 1 to 10 ms
FEWEST_BYTES = 1 << 20  # sent while it was looked at: of less, its speed says little

Sent = Mapping[str, Mapping[str, tuple[int, float]]]
"""By node and address of the peer: bytes sent so far, and seconds that this took."""


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


def slow_paths(_: Inference, data: Collected) -> Inference | None:
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
