# SPDX-License-Identifier: Apache-2.0
"""What a site's history says against its nodes, as a small file for every check, and as a prior.

A prior orders tests and shifts odds within bounds; it convicts and acquits nobody. So a node's
score may be read by checks that then become a part of its history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated

import msgspec

from slurm_health.records.decoding import from_json

VERSION = 1
# Chosen: a node that nobody has looked at for a week may have been repaired.
OLD_S = 7 * 86400.0

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Reliability(Enum):
    """What is concluded about a node's reliability."""

    LEMON = "lemon"
    SUSPECT = "suspect"  # something spoke against it, and that proves nothing
    CLEAR = "clear"
    UNKNOWN = "unknown"  # too few jobs


# As much as a verdict of an earlier check of the same job, and as a node on which a rank failed
# (preflight.master.priors): what proves nothing must weigh less.
MOST = {Reliability.LEMON: 0.3, Reliability.SUSPECT: 0.1}


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one node; `score` is how many of its next 100 jobs it may spoil."""

    level: Reliability
    score: Annotated[float, msgspec.Meta(ge=0, le=100)]
    jobs: _Count
    spoiled: _Count


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """How often something happened to nodes, in so much of what it can happen in.

    `nodes` are those that it happened to. `clump` is how many events come at once on average: 1
    where each is on a node of its own, more where few nodes have most of them, so that the events
    tell as much as so many fewer.
    """

    events: _Count
    exposure: Annotated[float, msgspec.Meta(ge=0)]
    nodes: _Count
    clump: Annotated[float, msgspec.Meta(ge=1)] = 1.0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How often the nodes of a cluster were bad, in the last `days`.

    `starts` counts the jobs that found a node bad before their script began, in jobs on a node;
    `hours` the scripts that a node failed in, in hours of a script on a node. Both without the
    lemons, which are known: `lemons` is how many of them would be bad in a job on all `nodes`.
    """

    days: float
    nodes: _Count
    starts: Counted
    hours: Counted
    lemons: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the nodes that something speaks against, by cluster and name.

    `rates` are those of all nodes of a cluster.
    """

    version: _Count
    written_s: float
    clusters: dict[str, dict[str, Known]]
    rates: dict[str, Rates] = {}


def written(
    clusters: dict[str, dict[str, Known]], rates: dict[str, Rates], *, now_s: float
) -> bytes:
    """Return the file's content, for what is known of nodes by cluster and name."""
    content = Published(version=VERSION, written_s=now_s, clusters=clusters, rates=rates)
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def read(data: bytes, *, now_s: float) -> Published:
    """Return what a file says.

    Raises:
        ValueError: it is damaged, of another version, or too old.
    """
    try:
        found = from_json(data, Published)
    except msgspec.MsgspecError as err:
        raise ValueError(f"it is damaged: {err}") from err
    if found.version != VERSION:
        raise ValueError(f"it is of version {found.version}, and this reads {VERSION}")
    if now_s - found.written_s > OLD_S:
        days = (now_s - found.written_s) / 86400
        raise ValueError(f"it was written {days:.0f} days ago; cron should write it every hour")
    return found


def known_of(found: Published, cluster: str, nodes: Iterable[str]) -> dict[str, Known]:
    """Return what is known of some nodes of a cluster; only those that something speaks against."""
    there = found.clusters.get(cluster, {})
    return {node: there[node] for node in nodes if node in there and there[node].level in MOST}


def prior_of(known: Mapping[str, Known]) -> dict[str, float]:
    """Return how likely nodes are to be bad, by what is known of them."""
    return {node: min(each.score / 100, MOST[each.level]) for node, each in known.items()}
