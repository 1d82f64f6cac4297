# SPDX-License-Identifier: Apache-2.0
"""From the samples of a run to the figures a report shows: one value per group and round."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from slurm_health.preflight.session.measurement import (
    allgather_busbw_gb_per_s,
    group_times,
    rate_gflop_per_s,
)
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.records import Sampled

ALLGATHER = "allgather"
MATMUL = "matmul"
_ALLGATHERS = frozenset({ALLGATHER, "rail_allgather", "node_allgather"})
_COPIES = frozenset({"memory_copy", "host_copy"})
_UNITS = {MATMUL: "GFLOP/s", **dict.fromkeys(_COPIES | _ALLGATHERS, "GB/s")}
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one probe measured on one node, one value per group the node was in, by round.

    An all-gather is its bus bandwidth in GB/s, a copy within a device what it reads and writes in
    GB/s, one from or to the host what it brings, matmul the rate in GFLOP/s, any other probe its
    time in ms. A value that was not measured is not there.
    """

    probe: str
    values: tuple[float, ...]

    @property
    def unit(self) -> str:
        """Return the unit of the values."""
        return unit_of(self.probe)


def unit_of(probe: str) -> str:
    """Return the unit a probe's figures have."""
    return _UNITS.get(probe.partition(" ")[0], "ms")  # a quantity's name may follow


def figures_by_node(
    samples: Iterable[Sampled],
    *,
    healthy: Collection[str] = (),
    bad_paths: Iterable[Collection[str]] = (),
) -> dict[str, tuple[Figure, ...]]:
    """Return the figures of each node that measured anything, by probe name.

    A healthy node's figure with a bad partner, or over a bad path, says nothing about the node,
    so such groups are left out of it where the whole group was measured together.

    Args:
        samples: all samples of the run, of all nodes.
        healthy: the nodes with a healthy verdict, empty while there is none.
        bad_paths: pairs of nodes whose connection is not well.
    """
    fit, paths = frozenset(healthy), [frozenset(ends) for ends in bad_paths]
    values: dict[str, dict[str, list[float]]] = {}
    for _, members, group in _groups(samples):
        all_well = members <= fit and not any(ends <= members for ends in paths)
        left_out = frozenset() if all_well else fit
        for node, probe, value in _values(members, group, not_judged_by_it=left_out):
            values.setdefault(node, {}).setdefault(probe, []).append(value)
    return {
        node: tuple(Figure(probe=name, values=tuple(probes[name])) for name in sorted(probes))
        for node, probes in values.items()
    }


def figures_by_round(samples: Iterable[Sampled]) -> dict[tuple[int, str], dict[str, float]]:
    """Return what each node measured in each round, by probe name, whoever its partners were.

    The keys are a round's number and a node's name; units as in `Figure`.
    """
    found: dict[tuple[int, str], dict[str, float]] = {}
    for number, members, group in _groups(samples):
        for node, probe, value in _values(members, group, not_judged_by_it=frozenset()):
            found.setdefault((number, node), {})[probe] = value
    return found


def _values(
    members: frozenset[str], group: Sequence[Sampled], *, not_judged_by_it: frozenset[str]
) -> Iterator[tuple[str, str, float]]:
    """Yield each node's figures in one group of one round: node, probe, value."""
    sample_of = {(sample.node, sample.metric): sample for sample in group}
    shown = _elapsed_ms(members, group, not_judged_by_it=not_judged_by_it)
    for (node, metric), elapsed_ms in shown.items():
        value = _value(sample_of[node, metric], elapsed_ms)
        if value is not None:
            yield node, str(metric), value


def _groups(samples: Iterable[Sampled]) -> list[tuple[int, frozenset[str], list[Sampled]]]:
    """Return the members of each group of each round with their samples, round by round."""
    found: dict[tuple[int, frozenset[str]], list[Sampled]] = {}
    for sample in samples:
        found.setdefault((sample.round, frozenset(sample.group)), []).append(sample)
    in_order = sorted(found.items(), key=lambda item: item[0][0])
    return [(number, members, group) for (number, members), group in in_order]


def _elapsed_ms(
    members: frozenset[str], group: Sequence[Sampled], *, not_judged_by_it: frozenset[str]
) -> dict[tuple[str, Metric], float]:
    """Return what each node took, by the slowest of its devices or rails.

    `not_judged_by_it` are left out of what the group did together.
    """
    times = group_times(members, group)
    together = {
        metric: dict.fromkeys(members - not_judged_by_it, elapsed_ms)
        for metric, elapsed_ms in times.shared_ms.items()
    }
    found: dict[tuple[str, Metric], float] = {}
    for metric, by_node in (*together.items(), *times.node_ms.items()):
        for node, elapsed_ms in by_node.items():
            key = node, replace(metric, part="")
            found[key] = max(elapsed_ms, found.get(key, 0.0))
    return found


def _value(sample: Sampled, elapsed_ms: float) -> float | None:
    value = elapsed_ms
    if sample.probe in _ALLGATHERS:
        if sample.world_size < 2 or not 0 < sample.total_bytes < _IMPOSSIBLE_BYTES:
            return None
        value = allgather_busbw_gb_per_s(
            total_bytes=sample.total_bytes, ranks=sample.world_size, elapsed_ms=elapsed_ms
        )
    elif sample.probe in _COPIES:
        value = min(sample.total_bytes, _IMPOSSIBLE_BYTES) / (elapsed_ms * 1e6)
    elif sample.probe == MATMUL:
        value = rate_gflop_per_s(flop=sample.flop, elapsed_ms=elapsed_ms)
    return value if isfinite(value) and value > 0 else None
