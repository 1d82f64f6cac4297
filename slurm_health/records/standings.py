# SPDX-License-Identifier: Apache-2.0
"""The standings of nodes in a site's history: a small file for every check, and a prior.

A prior orders tests and shifts odds within bounds; it never decides a verdict. So checks may read a
node's score although they become a part of its history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated

import msgspec

from slurm_health.records.decoding import from_json

VERSION = 1
# Chosen: a node may have been repaired within a week.
OLD_S = 7 * 86400.0

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Reliability(Enum):
    """The conclusion about a node's reliability."""

    LEMON = "lemon"
    SUSPECT = "suspect"  # evidence against it that proves nothing
    CLEAR = "clear"
    UNKNOWN = "unknown"  # too few jobs


# As much as a verdict of an earlier check of the same job, and as a node on which a rank failed
# (preflight.master.priors): evidence that proves nothing must weigh less.
MOST = {Reliability.LEMON: 0.3, Reliability.SUSPECT: 0.1}


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """The standing of one node; `score` is how many of its next 100 jobs it may spoil."""

    level: Reliability
    score: Annotated[float, msgspec.Meta(ge=0, le=100)]
    jobs: _Count
    spoiled: _Count


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The standings of nodes with evidence against them, by cluster and name."""

    version: _Count
    written_s: float
    clusters: dict[str, dict[str, Known]]


def written(clusters: dict[str, dict[str, Known]], *, now_s: float) -> bytes:
    """Return the file's content for standings by cluster and name."""
    content = Published(version=VERSION, written_s=now_s, clusters=clusters)
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def read(data: bytes, *, now_s: float) -> Published:
    """Return the content of a file.

    Raises:
        ValueError: it is damaged, of another version, or too old.
    """
    try:
        published = from_json(data, Published)
    except msgspec.MsgspecError as err:
        raise ValueError(f"it is damaged: {err}") from err
    if published.version != VERSION:
        raise ValueError(f"it is of version {published.version}, and this reads {VERSION}")
    if now_s - published.written_s > OLD_S:
        days = (now_s - published.written_s) / 86400
        raise ValueError(f"it was written {days:.0f} days ago; cron should write it every hour")
    return published


def known_of(published: Published, cluster: str, nodes: Iterable[str]) -> dict[str, Known]:
    """Return the standings of some nodes of a cluster, of those with evidence against them."""
    there = published.clusters.get(cluster, {})
    return {node: there[node] for node in nodes if node in there and there[node].level in MOST}


def prior_of(known: Mapping[str, Known]) -> dict[str, float]:
    """Return how likely nodes are to be bad, by their standings."""
    return {node: min(s.score / 100, MOST[s.level]) for node, s in known.items()}
