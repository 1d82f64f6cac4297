# SPDX-License-Identifier: Apache-2.0
"""The standing of every node as metrics, for a machine that sees the journals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slurm_health.fleet.history.answer import Lemons
from slurm_health.fleet.standing.standing import Standing
from slurm_health.records.standings import Level
from slurm_health.system.telemetry import Gauge, Sample, one_of

_LEVELS = tuple(each.value for each in Level)


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
