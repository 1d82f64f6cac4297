# SPDX-License-Identifier: Apache-2.0
"""The results of a health check for node_exporter's textfile collector. No daemon, no network."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from slurm_health import __version__
from slurm_health.node.rules.finding import UNWATCHED, CheckResult, Status, node_faults
from slurm_health.node.site import Site
from slurm_health.system.killable import run_guarded
from slurm_health.system.telemetry import Gauge, MetricSample, one_of, prometheus_text

FILE = "slurm_health.prom"
_LIMIT_S = 2.0
_STUCK = "metrics directory"
_STATUSES = tuple(status.value for status in Status)
# By the name of the metric, below `slurm_health_`.
_HELP = {
    "info": "Which slurm-health wrote this.",
    "last_check_timestamp_seconds": "When the last health check of this node ran.",
    "node_fault": "1 if the last health check measured a proven fault of this node.",
    "drained": "1 if slurm-health has drained this node and not returned it.",
    "breaker_tripped": "1 if the breaker has tripped: this node is not drained, even for a fault.",
    "unwatched_jobs": "Jobs here that run on though their watch has ended.",
    "check_status": "1 for the status of a check, 0 for every other status.",
    "check_duration_seconds": "How long a check took.",
    "check_figure": "A figure that a check measured; its name has the unit.",
}


def write(
    site: Site, results: Sequence[CheckResult], *, node: str, now_s: float, drained: bool
) -> None:
    """Replace the file, in a child. If that fails, the old file stays, and its time shows it."""
    from slurm_health.node import shared
    from slurm_health.node.rules.breaker import tripped_for
    from slurm_health.system.private_files import publish

    def tripped() -> bool:
        return tripped_for(shared.read_ledger(site.breaker), node) is not None

    is_tripped = None
    if site.breaker.directory:
        with contextlib.suppress(shared.StoreUnusable):
            is_tripped = shared.in_child(site, tripped, bool, limit_s=_LIMIT_S)

    def publish_file() -> bytes:
        metrics = gauges(results, now_s=now_s, drained=drained, tripped=is_tripped)
        publish(Path(site.metrics.directory) / FILE, prometheus_text(metrics).encode())
        return b""

    run_guarded(site.state, _STUCK, publish_file, _LIMIT_S)


def gauges(
    results: Sequence[CheckResult], *, now_s: float, drained: bool, tripped: bool | None
) -> list[Gauge]:
    """Return the metrics of a health check.

    Args:
        results: of its checks.
        now_s: when.
        drained: slurm-health has this node drained.
        tripped: the breaker keeps this node from being drained; None if that is unknown.
    """
    samples = {
        "info": [MetricSample(1, {"version": __version__})],
        "last_check_timestamp_seconds": [MetricSample(now_s)],
        "node_fault": [MetricSample(float(bool(node_faults(results))))],
        "drained": [MetricSample(float(drained))],
        "breaker_tripped": [] if tripped is None else [MetricSample(float(tripped))],
        "unwatched_jobs": [
            MetricSample(float(result.finding.figures[UNWATCHED]))
            for result in results
            if UNWATCHED in result.finding.figures
        ],
        "check_status": [
            sample
            for result in results
            for sample in one_of(
                result.status.value,
                _STATUSES,
                "status",
                check=result.name,
                shadow=str(result.shadow).lower(),
            )
        ],
        "check_duration_seconds": [
            MetricSample(result.elapsed_ms / 1000, {"check": result.name}) for result in results
        ],
        "check_figure": [
            MetricSample(float(value), {"check": result.name, "figure": name})
            for result in results
            for name, value in result.finding.figures.items()
            if isinstance(value, int | float)
        ],
    }
    return [
        Gauge(name=f"slurm_health_{name}", help=_HELP[name], samples=of_one)
        for name, of_one in samples.items()
    ]
