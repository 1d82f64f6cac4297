# SPDX-License-Identifier: Apache-2.0
"""What is asked of the index, and the values that it is answered with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from slurm_health.core.history.standing import WINDOW_DAYS, NodeRecord, Standing, standings
from slurm_health.core.history.trend import Trend, trend
from slurm_health.core.nodeset import expand
from slurm_health.errors import UsageError
from slurm_health.history.index import Index, Seen

_DAY_S = 86400.0


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
    checks: Sequence[Seen]
    standing: Standing
    series: Sequence[Series]


@dataclass(frozen=True, kw_only=True)
class Lemons:
    """What is concluded about every node of one cluster, the worst first."""

    cluster: str
    days: float
    standings: Sequence[Standing]


def histories(
    index: Index, nodelist: str, *, cluster: str | None, now_s: float, days: float = WINDOW_DAYS
) -> list[NodeHistory]:
    """Return the history of each node of a list; one of that name per cluster.

    Raises:
        UsageError: this is no node list, or no check has seen one of the nodes.
    """
    try:
        names = expand(nodelist)
    except ValueError as err:
        raise UsageError(str(err)) from err
    found = [
        _history(index, where, name, since_s=now_s - days * _DAY_S)
        for name in names
        for where in _clusters(index, name, cluster)
    ]
    missing = [name for name in names if name not in {each.node for each in found}]
    if missing:
        raise UsageError(_unknown(index, missing[0], cluster))
    return found


def lemons(
    index: Index, *, cluster: str | None, now_s: float, days: float = WINDOW_DAYS
) -> list[Lemons]:
    """Return what is concluded about the nodes of each cluster.

    Raises:
        UsageError: there is no such cluster.
    """
    known = index.clusters()
    if cluster is not None and cluster not in known:
        there = f"; there are {', '.join(known)}" if known else ""
        raise UsageError(f"no journal is of a cluster {cluster!r}{there}")
    return [
        Lemons(
            cluster=each,
            days=days,
            standings=standings(index.records(each, since_s=now_s - days * _DAY_S)),
        )
        for each in ([cluster] if cluster else known)
    ]


def _clusters(index: Index, node: str, cluster: str | None) -> list[str]:
    return [each for each in index.clusters() if cluster in {None, each} and index.has(each, node)]


def _history(index: Index, cluster: str, node: str, *, since_s: float) -> NodeHistory:
    checks = index.of_node(cluster, node, since_s=0.0)
    records = index.records(cluster, since_s=since_s)
    standing = {each.node: each for each in standings(records)}.get(node)
    if standing is None:  # no check of the window measured it
        empty = NodeRecord(node=node, jobs=0, users=0)
        standing = next(each for each in standings([*records, empty]) if each.node == node)
    return NodeHistory(
        cluster=cluster,
        node=node,
        checks=checks,
        standing=standing,
        series=_series(checks),
    )


def _series(checks: Iterable[Seen]) -> list[Series]:
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
