# SPDX-License-Identifier: Apache-2.0
"""Histories and lemons as JSON. `version` changes when a field changes its meaning or goes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slurm_health.fleet.history.answer import Lemons, NodeHistory, Series
from slurm_health.fleet.history.index import Seen
from slurm_health.fleet.standing.standing import Standing

VERSION = 1


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
