# SPDX-License-Identifier: Apache-2.0
"""What a health check found, for node_exporter's textfile collector. No daemon, no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurm_health import __version__
from slurm_health.node.rules.finding import CheckResult, Status, node_faults
from slurm_health.node.site import Site
from slurm_health.system.killable import Answered, run_guarded
from slurm_health.system.telemetry import Gauge, MetricSample, one_of, prometheus_text

FILE = "slurm_health.prom"
_LIMIT_S = 2.0
_STUCK = "metrics directory"
_STATUSES = tuple(each.value for each in Status)
# What each metric says, below `slurm_health_`.
_HELP = {
    "info": "Which slurm-health wrote this.",
    "last_check_timestamp_seconds": "When the last health check of this node ran.",
    "node_fault": "1 where the last health check found a proven fault of this node.",
    "drained": "1 where slurm-health has drained this node and not returned it.",
    "breaker_tripped": (
        "1 where the breaker has tripped: this node is not drained, even for a fault."
    ),
    "check_status": "1 for what each check concluded, 0 for what it did not.",
    "check_duration_seconds": "How long each check took.",
    "check_figure": "What each check measured; its name has the unit.",
}


def keep(
    site: Site, results: Sequence[CheckResult], *, node: str, now_s: float, drained: bool
) -> None:
    """Replace the file, in a child; what cannot be written is lost, and its age says so."""
    from slurm_health.system.private_files import publish

    tripped = _breaker_has_tripped(site, node)

    def work() -> bytes:
        told = prometheus_text(gauges(results, now_s=now_s, drained=drained, tripped=tripped))
        publish(Path(site.metrics.directory) / FILE, told.encode())
        return b""

    run_guarded(site.state, _STUCK, work, _LIMIT_S)


def _breaker_has_tripped(site: Site, node: str) -> bool | None:
    """Tell whether this node is not drained whatever it has; None where nobody knows."""
    from slurm_health.node.shared import STUCK, StoreUnusable, read_ledger

    if not site.breaker.directory:
        return None

    def look() -> bytes:
        from slurm_health.node.rules.breaker import tripped_for

        try:
            return b"1" if tripped_for(read_ledger(site.breaker), node) else b"0"
        except StoreUnusable:
            return b""

    match run_guarded(site.state, STUCK, look, _LIMIT_S):
        case Answered(data=data) if data:
            return data == b"1"
        case _:
            return None


def gauges(
    results: Sequence[CheckResult], *, now_s: float, drained: bool, tripped: bool | None
) -> list[Gauge]:
    """Return what a health check found.

    Args:
        results: what the checks found.
        now_s: when.
        drained: slurm-health has this node drained.
        tripped: the breaker keeps this node from being drained; None where nobody knows.
    """
    figures = [
        MetricSample(float(value), {"check": each.name, "figure": name})
        for each in results
        for name, value in each.finding.figures.items()
        if isinstance(value, int | float)
    ]
    statuses = [
        sample
        for each in results
        for sample in one_of(
            each.status.value,
            _STATUSES,
            "status",
            check=each.name,
            shadow=str(each.shadow).lower(),
        )
    ]
    took = [MetricSample(each.elapsed_ms / 1000, {"check": each.name}) for each in results]
    faulty = float(bool(node_faults(results)))
    samples = {
        "info": [MetricSample(1, {"version": __version__})],
        "last_check_timestamp_seconds": [MetricSample(now_s)],
        "node_fault": [MetricSample(faulty)],
        "drained": [MetricSample(float(drained))],
        "breaker_tripped": [] if tripped is None else [MetricSample(float(tripped))],
        "check_status": statuses,
        "check_duration_seconds": took,
        "check_figure": figures,
    }
    return [
        Gauge(name=f"slurm_health_{name}", help=_HELP[name], samples=of_one)
        for name, of_one in samples.items()
    ]
