# SPDX-License-Identifier: Apache-2.0
"""Histories and lemons as JSON, and the standing of every node as metrics.

`version` changes when a field of the JSON changes its meaning or goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slurm_health.fleet.history.answer import Lemons, NodeHistory, Series
from slurm_health.fleet.history.index import Seen
from slurm_health.fleet.standing.standing import Standing
from slurm_health.records.standings import Reliability
from slurm_health.system.telemetry import Gauge, Sample, one_of

VERSION = 1
_LEVELS = tuple(each.value for each in Reliability)


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


def _check(check: Seen) -> dict[str, Any]:
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
            samples=[Sample(now_s)],
        ),
        Gauge(
            name="slurm_health_history_unread_jobs",
            help="Jobs whose journal could not be read, or not wholly.",
            samples=[Sample(float(sum(unread.values())))],
        ),
        Gauge(
            name="slurm_health_node_jobs",
            help="Jobs that were checked on the node within the window.",
            samples=[Sample(float(standing.jobs), labels) for labels, standing in each()],
        ),
        Gauge(
            name="slurm_health_node_spoiled_jobs",
            help="Of those, the jobs in which something spoke against the node.",
            samples=[Sample(float(standing.spoiled), labels) for labels, standing in each()],
        ),
        Gauge(
            name="slurm_health_node_lemon_score",
            help="How many of its next 100 jobs the node is expected to spoil.",
            samples=[Sample(standing.score, labels) for labels, standing in each()],
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
