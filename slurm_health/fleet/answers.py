# SPDX-License-Identifier: Apache-2.0
"""What is asked of the index, `history` and `lemons`, and the answers as text, JSON or metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from statistics import median

import msgspec

from slurm_health.fleet.index import Index, NodeCheck
from slurm_health.fleet.standing import (
    WINDOW_DAYS,
    NodeRecord,
    Standing,
    standings,
)
from slurm_health.records.errors import UsageError
from slurm_health.records.nodeset import expand, fold
from slurm_health.records.standings import Reliability
from slurm_health.records.text import NOTHING, counted
from slurm_health.records.verdict import Level
from slurm_health.report.layout import Page, moment_text
from slurm_health.system.telemetry import Gauge, MetricSample, one_of

_DAY_S = 86400.0
VERSION = 3  # of the JSON: changes when a field changes its meaning or goes
# Where Slurm cannot be asked which nodes there are: so many that no other user has been on. Chosen:
# more than most clusters have, and few enough for a time series database.
MOST_NODES_OF_USER = 1000

KnownNodes = Mapping[str, Collection[str]]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a node, or of a part of it, over all checks."""

    part: str
    metric: str
    latest: float
    typical: float
    checks: int


class NodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one node, the oldest check first."""

    cluster: str
    node: str
    standing: Standing
    checks: list[NodeCheck]
    figures: list[Series]


class ClusterStandings(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion about every node of one cluster, the worst first.

    `left_out` counts the nodes that journals name and that are left out: Slurm does not know them,
    or could not be asked, and one user has named too many alone.
    """

    cluster: str
    days: float
    nodes: list[Standing]
    left_out: int


def histories(
    index: Index,
    nodelist: str,
    *,
    now_s: float,
    days: float = WINDOW_DAYS,
    known: KnownNodes,
) -> list[NodeHistory]:
    """Return the history of each node of a list; one of that name per cluster.

    Raises:
        UsageError: this is no node list, or no check was of one of the nodes.
    """
    try:
        names = expand(nodelist)
    except ValueError as err:
        raise UsageError(str(err)) from err
    since_s = now_s - days * _DAY_S
    answers: dict[tuple[str, str], NodeHistory] = {}
    for where in index.clusters():
        checks = {name: its for name in names if (its := index.checks_of(where, name))}
        if not checks:
            continue
        records, others = _believed(index, where, since_s=since_s, known=known, named={})
        fleet = {standing.node: standing for standing in standings(records)}
        left_out = {other.node: other for other in others}
        for name, of_node in checks.items():
            if name not in fleet:  # left out, or not measured in the window
                own = left_out.get(name) or NodeRecord(node=name, jobs=0, users=0)
                fleet |= {
                    standing.node: standing
                    for standing in standings([*records, own])
                    if standing.node == name
                }
            answers[where, name] = NodeHistory(
                cluster=where,
                node=name,
                standing=fleet[name],
                checks=of_node,
                figures=_series(of_node),
            )
    for name in names:
        if not any(node == name for _, node in answers):
            import difflib  # an answer does without

            near = difflib.get_close_matches(name, index.nodes(), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"no check of {name} is in the journals that you may read{hint}")
    return sorted(answers.values(), key=lambda answer: names.index(answer.node))


def lemons(
    index: Index, *, now_s: float, days: float = WINDOW_DAYS, known: KnownNodes
) -> list[ClusterStandings]:
    """Return the conclusions about the nodes of each cluster.

    Args:
        index: what all journals say.
        now_s: the time.
        days: how far back jobs count.
        known: the nodes of the clusters whose Slurm answered; others are believed to some extent.
    """
    answers: list[ClusterStandings] = []
    named: dict[int, int] = {}
    for name in index.clusters():
        records, others = _believed(
            index, name, since_s=now_s - days * _DAY_S, known=known, named=named
        )
        answers.append(
            ClusterStandings(
                cluster=name, days=days, nodes=standings(records), left_out=len(others)
            )
        )
    return answers


def _believed(
    index: Index, cluster: str, *, since_s: float, known: KnownNodes, named: dict[int, int]
) -> tuple[list[NodeRecord], list[NodeRecord]]:
    """Divide the nodes that journals name into those that are believed to exist, and the others.

    `named` counts the nodes that one user alone has named, over all clusters.
    """
    records = index.records(cluster, since_s=since_s)
    believed: list[NodeRecord] = []
    others: list[NodeRecord] = []
    alone = {} if cluster in known else index.only_users(cluster)
    for record in records:
        if cluster in known:
            exists = record.node in known[cluster]
        elif (uid := alone[record.node]) is None:
            exists = True
        else:
            named[uid] = named.get(uid, 0) + 1
            exists = named[uid] <= MOST_NODES_OF_USER
        (believed if exists else others).append(record)
    return believed, others


def _series(checks: Iterable[NodeCheck]) -> list[Series]:
    points: dict[tuple[str, str], list[float]] = {}
    for check in checks:
        for part, metrics in check.figures.items():
            for metric, value in metrics.items():
                points.setdefault((part, metric), []).append(value)
    return [
        Series(
            part=part, metric=metric, latest=values[-1], typical=median(values), checks=len(values)
        )
        for (part, metric), values in sorted(points.items())
    ]


# --- as text -------------------------------------------------------------------------------------


def history_text(answer: NodeHistory, page: Page, *, most: int) -> str:
    """Return a node's history: the conclusion, its last checks, its figures."""
    standing, checks = answer.standing, answer.checks
    jobs = counted(len({check.job for check in checks}), "job")
    since = moment_text(checks[0].time_s)[:10]
    known = standing.level is not Reliability.UNKNOWN
    score = f", score {standing.score:g}" if known else ""
    lines = page.phrases(
        [
            f"{answer.node} of {answer.cluster}",
            f"{counted(len(checks), 'check')} of {jobs} since {since}",
            f"{standing.level.value}{score}",
        ]
    )
    lines += page.paragraph(
        f"spoiled {standing.spoiled} of {counted(standing.jobs, 'job')} in the window;"
        f" other nodes {standing.elsewhere_spoiled} of {standing.elsewhere_jobs}"
    )
    lines += [*page.paragraph(standing.reason), ""]
    rows: list[Sequence[str]] = [("CHECKED", "JOB", "VERDICT", "SIGNALS", "REASON")]
    for check in reversed(checks[-most:]):
        verdict = check.level.value if check.level else NOTHING
        if check.level in {Level.SLOW, Level.FAULTY} and check.component not in {"", "node"}:
            verdict += f" ({check.component})"
        rows.append(
            (
                moment_text(check.time_s),
                check.job if check.label == "0" else f"{check.job} ({check.label})",
                verdict,
                ", ".join(check.signals) or NOTHING,
                check.reason,
            )
        )
    lines += page.table(rows)
    if len(checks) > most:
        lines += page.paragraph(f"and {len(checks) - most} earlier; --json has them")
    if answer.figures:
        rows = [("PART", "MEASURED", "LATEST", "TYPICAL", "CHECKS")]
        for series in answer.figures:
            figures = (f"{series.latest:.4g}", f"{series.typical:.4g}", str(series.checks))
            rows.append((series.part or "node", series.metric, *figures))
        lines += ["", *page.table(rows, align=("left", "left", "right", "right", "right"))]
    return "\n".join(lines) + "\n"


def lemons_text(answers: Sequence[ClusterStandings], page: Page) -> str:
    """Return the nodes with evidence against them, the worst first, and how many others."""
    if not answers:
        return "no check is in the journals that you may read; --journal=DIR names others\n"
    # A cluster of which nothing is known says nothing beside one of which something is.
    known = [answer for answer in answers if answer.nodes or answer.left_out] or answers
    return "\n".join("\n".join(_cluster_lines(one, page)) + "\n" for one in known)


def _cluster_lines(answer: ClusterStandings, page: Page) -> list[str]:
    lines = page.paragraph(
        f"{answer.cluster}: {counted(len(answer.nodes), 'node')} checked in the last"
        f" {answer.days:g} days, in jobs and sweeps; each job counts once per node"
    )
    rows: list[Sequence[str]] = [
        ("NODE", "STANDING", "SCORE", "JOBS", "SPOILED", "SIGNALS", "REASON")
    ]
    for node in answer.nodes:
        if node.spoiled:
            signals = (f"{name} {n}" if n > 1 else name for name, n in node.signals.items())
            counts = (f"{node.score:g}", str(node.jobs), str(node.spoiled))
            rows.append((node.node, node.level.value, *counts, ", ".join(signals), node.reason))
    if len(rows) > 1:
        align = ("left", "left", "right", "right", "right", "left")
        lines += ["", *page.table(rows, align=align), ""]
    of_level = {
        level: fold(sorted(node.node for node in answer.nodes if node.level is level))
        for level in (Reliability.CLEAR, Reliability.UNKNOWN)
    }
    if clear := of_level[Reliability.CLEAR]:
        lines += page.paragraph(f"clear: {clear}")
    if answer.left_out:
        lines += page.paragraph(
            f"left out: {counted(answer.left_out, 'node')} that journals name and Slurm does not,"
            " or that one user alone names beyond a limit"
        )
    if unknown := of_level[Reliability.UNKNOWN]:
        lines += page.paragraph(f"no fault seen, but too few jobs to tell: {unknown}")
    return lines


def unread_text(reasons: Mapping[str, int], page: Page) -> str:
    """Return of how many jobs the journal could not be read, empty if all could."""
    if not reasons:
        return ""
    first = max(reasons, key=lambda reason: reasons[reason])
    text = f"{counted(sum(reasons.values()), 'job')} could not be read, or not wholly: {first}"
    more = f", and {counted(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
    return "\n".join(page.paragraph(text + more)) + "\n"


# --- for programs --------------------------------------------------------------------------------


def document(
    name: str,
    answers: Sequence[NodeHistory] | Sequence[ClusterStandings],
    unread: Mapping[str, int],
) -> dict[str, object]:
    """Return answers as one document, in which they are called `name`: nodes, or clusters."""
    return {"version": VERSION, name: answers, "unread": unread}


def gauges(
    answers: Sequence[ClusterStandings], unread: Mapping[str, int], *, now_s: float
) -> list[Gauge]:
    """Return the conclusion about each node, of each cluster, for Prometheus."""
    nodes = [
        ({"cluster": cluster.cluster, "node": node.node}, node)
        for cluster in answers
        for node in cluster.nodes
    ]

    def of_nodes(value: Callable[[Standing], float]) -> list[MetricSample]:
        return [MetricSample(float(value(node)), labels) for labels, node in nodes]

    levels = [level.value for level in Reliability]
    standing = [one_of(node.level.value, levels, "standing", **labels) for labels, node in nodes]
    metrics = {
        "history_timestamp_seconds": (
            "When the journals were looked through.",
            [MetricSample(now_s)],
        ),
        "history_unread_jobs": (
            "Jobs whose journal could not be read, or not wholly.",
            [MetricSample(float(sum(unread.values())))],
        ),
        "node_jobs": (
            "Jobs that were checked on the node within the window.",
            of_nodes(lambda node: node.jobs),
        ),
        "node_spoiled_jobs": (
            "Of those, the jobs with evidence against the node.",
            of_nodes(lambda node: node.spoiled),
        ),
        "node_lemon_score": (
            "How many of its next 100 jobs the node is expected to spoil.",
            of_nodes(lambda node: node.score),
        ),
        "node_standing": (
            "1 for the conclusion about the node, 0 for the others.",
            list(chain.from_iterable(standing)),
        ),
    }
    return [
        Gauge(name=f"slurm_health_{name}", help=text, samples=samples)
        for name, (text, samples) in metrics.items()
    ]
