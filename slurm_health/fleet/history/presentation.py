# SPDX-License-Identifier: Apache-2.0
"""Histories and lemons as text and as JSON, and the standing of every node as metrics.

`version` changes when a field of the JSON changes its meaning or goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slurm_health.fleet.history.answer import Lemons, NodeHistory, Series
from slurm_health.fleet.history.index import NodeSeen
from slurm_health.fleet.standing.standing import Standing
from slurm_health.records.nodeset import fold
from slurm_health.records.standings import Reliability
from slurm_health.records.text import counted as many
from slurm_health.records.verdict import Level
from slurm_health.report.layout import Page
from slurm_health.system.telemetry import Gauge, MetricSample, one_of

_NOTHING = "\N{EN DASH}"  # stands for what is not there
_HEADS = ("CHECKED", "JOB", "VERDICT", "SIGNALS", "REASON")
_FIGURE_HEADS = ("PART", "MEASURED", "LATEST", "TYPICAL", "CHECKS", "TREND")
_LEMON_HEADS = ("NODE", "STANDING", "SCORE", "JOBS", "SPOILED", "SIGNALS", "REASON")
VERSION = 1  # of the JSON
_LEVELS = tuple(each.value for each in Reliability)


def history_text(found: NodeHistory, page: Page, *, most: int) -> str:
    """Return a node's history: what is concluded, its last checks, its figures."""
    lines = [*_head(found, page), ""]
    lines += page.table([_HEADS, *(_check_row(each) for each in reversed(found.checks[-most:]))])
    left_out = len(found.checks) - most
    if left_out > 0:
        lines += page.paragraph(f"and {left_out} earlier; --limit={len(found.checks)} shows them")
    if found.series:
        rows = [_FIGURE_HEADS, *(_series_row(each) for each in found.series)]
        lines += ["", *page.table(rows, align=("left", "left", "right", "right", "right"))]
    return "\n".join(lines) + "\n"


def lemons_text(found: Sequence[Lemons], page: Page) -> str:
    """Return the nodes that something speaks against, the worst first, and how many others."""
    if not found:
        return "no check is in the journals that you may read; --journal=DIR names others\n"
    # A cluster of which nothing is known says nothing beside one of which something is.
    told = [each for each in found if each.standings or each.unknown] or found
    return "\n".join("\n".join(_lemons_lines(each, page)) + "\n" for each in told)


def unread_text(reasons: Mapping[str, int], page: Page) -> str:
    """Return of how many jobs the journal could not be read, empty where all could."""
    if not reasons:
        return ""
    count = sum(reasons.values())
    first = max(reasons, key=lambda each: reasons[each])
    said = f"{many(count, 'job')} could not be read, or not wholly: {first}"
    more = f", and {many(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
    return "\n".join(page.paragraph(said + more)) + "\n"


def _head(found: NodeHistory, page: Page) -> list[str]:
    standing = found.standing
    checks, jobs = len(found.checks), len({each.job for each in found.checks})
    first = _date(found.checks[0].time_s)
    counted = f"{many(checks, 'check')} of {many(jobs, 'job')} since {first[:10]}"
    phrases = [
        f"{found.node} of {found.cluster}",
        counted,
        _level(standing),
    ]
    lines = page.phrases(phrases)
    lines += page.paragraph(f"{_spoiled(standing)}; {_elsewhere(standing)}")
    return [*lines, *page.paragraph(standing.reason)]


def _level(standing: Standing) -> str:
    """Return the conclusion; with its score, unless that would only be what is not known."""
    known = standing.level is not Reliability.UNKNOWN
    return f"{standing.level.value}, score {standing.score:g}" if known else standing.level.value


def _spoiled(standing: Standing) -> str:
    return f"spoiled {standing.spoiled} of {many(standing.jobs, 'job')} in the window"


def _elsewhere(standing: Standing) -> str:
    return f"other nodes {standing.elsewhere_spoiled} of {standing.elsewhere_jobs}"


def _check_row(check: NodeSeen) -> list[str]:
    said = check.said
    job = check.job if check.label == "0" else f"{check.job} ({check.label})"
    verdict = said.level.value if said.level else _NOTHING
    if said.level in {Level.SLOW, Level.FAULTY} and said.component not in {"", "node"}:
        verdict += f" ({said.component})"
    signals = ", ".join(said.signals) or _NOTHING
    return [_date(check.time_s), job, verdict, signals, said.said]


def _series_row(series: Series) -> list[str]:
    found = series.trend
    text = _NOTHING
    if found is not None:
        word = "rises" if found.change > 0 else "falls"
        text = f"{word} {abs(found.change):.0%} in {found.days:.1f} days"
    return [
        series.part or "node",
        series.metric,
        f"{series.latest:.4g}",
        f"{series.typical:.4g}",
        str(series.checks),
        text,
    ]


def _lemons_lines(found: Lemons, page: Page) -> Iterable[str]:
    yield from page.paragraph(
        f"{found.cluster}: {many(len(found.standings), 'node')} checked in the last"
        f" {found.days:g} days, in jobs and sweeps; each job counts once per node"
    )
    named = [each for each in found.standings if each.spoiled]
    if named:
        rows = [_LEMON_HEADS, *map(_lemon_row, named)]
        yield ""
        yield from page.table(rows, align=("left", "left", "right", "right", "right", "left"))
        yield ""
    clear = [each.node for each in found.standings if each.level is Reliability.CLEAR]
    unknown = [each.node for each in found.standings if each.level is Reliability.UNKNOWN]
    if clear:
        yield from page.paragraph(f"clear: {fold(sorted(clear))}")
    if found.unknown:
        yield from page.paragraph(
            f"left out: {many(found.unknown, 'node')} that journals name and Slurm does not, or"
            " that one user alone names beyond a limit"
        )
    if unknown:
        yield from page.paragraph(
            f"no fault seen, but too few jobs to tell: {fold(sorted(unknown))}"
        )


def _lemon_row(standing: Standing) -> list[str]:
    signals = ", ".join(
        f"{name} {count}" if count > 1 else name for name, count in standing.signals.items()
    )
    return [
        standing.node,
        standing.level.value,
        f"{standing.score:g}",
        str(standing.jobs),
        str(standing.spoiled),
        signals,
        standing.reason,
    ]


def _date(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return "at no known time"


def histories_json(found: Sequence[NodeHistory], unread: Mapping[str, int]) -> str:
    """Return the histories of nodes."""
    nodes = [
        {
            "cluster": each.cluster,
            "node": each.node,
            "standing": _standing(each.standing),
            "checks": [_check(check) for check in each.checks],
            "figures": [_series(series) for series in each.series],
        }
        for each in found
    ]
    return _text({"version": VERSION, "nodes": nodes, "unread": dict(unread)})


def lemons_json(found: Sequence[Lemons], unread: Mapping[str, int]) -> str:
    """Return what is concluded about every node."""
    clusters = [
        {
            "cluster": each.cluster,
            "days": each.days,
            "nodes": [_standing(standing) for standing in each.standings],
            "nodes_left_out": each.unknown,
        }
        for each in found
    ]
    return _text({"version": VERSION, "clusters": clusters, "unread": dict(unread)})


def _standing(standing: Standing) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(standing)
    return fields


def _check(check: NodeSeen) -> dict[str, Any]:
    said: dict[str, Any] = msgspec.to_builtins(check.said)
    figures = [
        {"part": each.part, "metric": each.metric, "value": each.value}
        for each in check.said.figures
    ]
    return {
        "job": check.job,
        "label": check.label,
        "time_s": check.time_s,
        "uid": check.uid,
        "level": said.get("level"),
        "component": check.said.component,
        "slowdown": check.said.slowdown,
        "reason": check.said.said,
        "signals": list(check.said.signals),
        "figures": figures,
        "parts": check.said.parts,
    }


def _series(series: Series) -> dict[str, Any]:
    trend = series.trend
    return {
        "part": series.part,
        "metric": series.metric,
        "latest": series.latest,
        "typical": series.typical,
        "checks": series.checks,
        "trend": None if trend is None else {"change": trend.change, "days": trend.days},
    }


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def gauges(found: Sequence[Lemons], unread: Mapping[str, int], *, now_s: float) -> list[Gauge]:
    """Return what is concluded about each node, of each cluster."""

    def each() -> Iterator[tuple[dict[str, str], Standing]]:
        for cluster in found:
            for standing in cluster.standings:
                yield {"cluster": cluster.cluster, "node": standing.node}, standing

    return [
        Gauge(
            name="slurm_health_history_timestamp_seconds",
            help="When the journals were looked through.",
            samples=[MetricSample(now_s)],
        ),
        Gauge(
            name="slurm_health_history_unread_jobs",
            help="Jobs whose journal could not be read, or not wholly.",
            samples=[MetricSample(float(sum(unread.values())))],
        ),
        Gauge(
            name="slurm_health_node_jobs",
            help="Jobs that were checked on the node within the window.",
            samples=[MetricSample(float(standing.jobs), labels) for labels, standing in each()],
        ),
        Gauge(
            name="slurm_health_node_spoiled_jobs",
            help="Of those, the jobs in which something spoke against the node.",
            samples=[MetricSample(float(standing.spoiled), labels) for labels, standing in each()],
        ),
        Gauge(
            name="slurm_health_node_lemon_score",
            help="How many of its next 100 jobs the node is expected to spoil.",
            samples=[MetricSample(standing.score, labels) for labels, standing in each()],
        ),
        Gauge(
            name="slurm_health_node_standing",
            help="1 for what is concluded about the node, 0 for what is not.",
            samples=[
                sample
                for labels, standing in each()
                for sample in one_of(standing.level.value, _LEVELS, "standing", **labels)
            ],
        ),
    ]
