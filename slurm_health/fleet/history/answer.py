# SPDX-License-Identifier: Apache-2.0
"""What is asked of the index, and the values that it is answered with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from slurm_health.fleet.history.index import Index, NodeSeen
from slurm_health.fleet.standing.standing import (
    WINDOW_DAYS,
    NodeRecord,
    Standing,
    Trend,
    standings,
    trend,
)
from slurm_health.records.errors import UsageError
from slurm_health.records.nodeset import expand

_DAY_S = 86400.0
# Where Slurm cannot be asked which nodes there are: so many that no other user has been on. Chosen:
# more than most clusters have, and few enough for a time series database.
MOST_NODES_OF_USER = 1000

KnownNodes = Mapping[str, Collection[str]]
_NONE_KNOWN: KnownNodes = {}


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure of a node, or of a part of it, over all checks."""

    part: str
    metric: str
    latest: float
    typical: float
    checks: int
    trend: Trend | None


@dataclass(frozen=True, kw_only=True)
class NodeHistory:
    """Everything that is known of one node, the oldest check first."""

    cluster: str
    node: str
    checks: Sequence[NodeSeen]
    standing: Standing
    series: Sequence[Series]


@dataclass(frozen=True, kw_only=True)
class Lemons:
    """What is concluded about every node of one cluster, the worst first.

    `unknown` counts the nodes that journals name and that are left out: Slurm does not know them,
    or could not be asked, and one user has named too many alone.
    """

    cluster: str
    days: float
    standings: Sequence[Standing]
    unknown: int = 0


def histories(
    index: Index,
    nodelist: str,
    *,
    cluster: str | None,
    now_s: float,
    days: float = WINDOW_DAYS,
    known: KnownNodes = _NONE_KNOWN,
) -> list[NodeHistory]:
    """Return the history of each node of a list; one of that name per cluster.

    Raises:
        UsageError: this is no node list, or no check has seen one of the nodes.
    """
    try:
        names = expand(nodelist)
    except ValueError as err:
        raise UsageError(str(err)) from err
    wanted: dict[str, set[str]] = {}
    for where in [each for each in index.clusters() if cluster in {None, each}]:
        wanted[where] = {name for name in names if index.has(where, name)}
    since_s = now_s - days * _DAY_S
    standing_of = {
        where: _standings(index, where, there, since_s=since_s, known=known)
        for where, there in wanted.items()
        if there
    }
    found = [
        _history(index, where, name, standing_of[where][name])
        for name in names
        for where in wanted
        if name in wanted[where]
    ]
    there = {each.node for each in found}
    missing = [name for name in names if name not in there]
    if missing:
        raise UsageError(_unknown(index, missing[0], cluster))
    return found


def lemons(
    index: Index,
    *,
    cluster: str | None,
    now_s: float,
    days: float = WINDOW_DAYS,
    known: KnownNodes = _NONE_KNOWN,
) -> list[Lemons]:
    """Return what is concluded about the nodes of each cluster.

    Args:
        index: what all journals say.
        cluster: the only one that is asked about, None for all.
        now_s: the time.
        days: how far back jobs count.
        known: the nodes of clusters whose Slurm has told them; others' are believed to some extent.

    Raises:
        UsageError: there is no such cluster.
    """
    clusters = index.clusters()
    if cluster is not None and cluster not in clusters:
        there = f"; there are {', '.join(clusters)}" if clusters else ""
        raise UsageError(f"no journal is of cluster {cluster!r}{there}")
    believed = _Believed(known)
    found = []
    for each in [cluster] if cluster else clusters:
        records, unknown = believed.of(index, each, since_s=now_s - days * _DAY_S)
        found.append(Lemons(cluster=each, days=days, standings=standings(records), unknown=unknown))
    return found


class _Believed:
    """Which of the nodes that journals name are believed to be there."""

    def __init__(self, known: KnownNodes) -> None:
        self._known = known
        self._named: dict[int, int] = {}

    def of(self, index: Index, cluster: str, *, since_s: float) -> tuple[list[NodeRecord], int]:
        """Return the records of a cluster's nodes, and how many nodes are left out."""
        records = index.records(cluster, since_s=since_s)
        if cluster in self._known:
            kept = [each for each in records if each.node in self._known[cluster]]
        else:
            alone = index.users(cluster)
            kept = [each for each in records if self._is_one_more(alone[each.node])]
        return kept, len(records) - len(kept)

    def _is_one_more(self, uid: int | None) -> bool:
        if uid is None:
            return True
        self._named[uid] = self._named.get(uid, 0) + 1
        return self._named[uid] <= MOST_NODES_OF_USER


def _standings(
    index: Index, cluster: str, nodes: Collection[str], *, since_s: float, known: KnownNodes
) -> dict[str, Standing]:
    """Return what is concluded about each of these nodes of a cluster."""
    records, _ = _Believed(known).of(index, cluster, since_s=since_s)
    found = {each.node: each for each in standings(records)}
    # These are left out, as those that Slurm has no more; or no check of the window measured them.
    left_out = {node: NodeRecord(node=node, jobs=0, users=0) for node in nodes if node not in found}
    if left_out:
        everything = index.records(cluster, since_s=since_s)
        left_out |= {each.node: each for each in everything if each.node in left_out}
    return {each.node: each for each in standings([*records, *left_out.values()])} | found


def _history(index: Index, cluster: str, node: str, standing: Standing) -> NodeHistory:
    checks = index.of_node(cluster, node, since_s=0.0)
    return NodeHistory(
        cluster=cluster,
        node=node,
        checks=checks,
        standing=standing,
        series=_series(checks),
    )


def _series(checks: Iterable[NodeSeen]) -> list[Series]:
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for check in checks:
        for figure in check.said.figures:
            points.setdefault((figure.part, figure.metric), []).append((check.time_s, figure.value))
    return [
        Series(
            part=part,
            metric=metric,
            latest=values[-1][1],
            typical=median(value for _, value in values),
            checks=len(values),
            trend=trend(values),
        )
        for (part, metric), values in sorted(points.items())
    ]


def _unknown(index: Index, node: str, cluster: str | None) -> str:
    import difflib  # an answer does without

    near = difflib.get_close_matches(node, index.nodes(), n=3)
    where = f" on cluster {cluster}" if cluster else ""
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"no check of {node}{where} is in the journals that you may read{hint}"
