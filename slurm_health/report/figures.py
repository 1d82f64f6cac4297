# SPDX-License-Identifier: Apache-2.0
"""From the samples of a run to the figures a report shows: one value per group and round."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import isfinite

from slurm_health.core.records import Sampled
from slurm_health.core.session.measurement import (
    SHARED_SCOPES,
    allgather_busbw_gb_per_s,
    metric,
    rate_gflop_per_s,
    reduced_ms,
)

ALLGATHER = "allgather"
MATMUL = "matmul"
_ALLGATHERS = frozenset({ALLGATHER, "rail_allgather", "node_allgather"})
_MEMORY_COPY = "memory_copy"
_UNITS = {MATMUL: "GFLOP/s", _MEMORY_COPY: "GB/s", **dict.fromkeys(_ALLGATHERS, "GB/s")}
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one probe measured on one node, one value per group the node was in, by round.

    An all-gather is its bus bandwidth in GB/s, a copy what it reads and writes in GB/s, matmul
    the rate in GFLOP/s, any other probe its time in ms. A value that was not measured is not
    there.
    """

    probe: str
    values: tuple[float, ...]

    @property
    def unit(self) -> str:
        """Return the unit of the values."""
        return unit_of(self.probe)


def unit_of(probe: str) -> str:
    """Return the unit a probe's figures have."""
    return _UNITS.get(probe, "ms")


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
    for group in sorted(_groups(samples), key=lambda group: group.round):
        all_well = group.members <= fit and not any(ends <= group.members for ends in paths)
        for node, elapsed_ms in group.elapsed_ms().items():
            if group.is_shared and node in fit and not all_well:
                continue
            value = _value(group.samples[node], elapsed_ms)
            if value is not None:
                values.setdefault(node, {}).setdefault(group.probe, []).append(value)
    return {
        node: tuple(Figure(probe=name, values=tuple(probes[name])) for name in sorted(probes))
        for node, probes in values.items()
    }


@dataclass(frozen=True, kw_only=True)
class _Group:
    """What the members of one group measured with one probe in one round."""

    round: int
    probe: str
    members: frozenset[str]
    samples: dict[str, Sampled]

    @property
    def is_shared(self) -> bool:
        return any(sample.scope in SHARED_SCOPES for sample in self.samples.values())

    def elapsed_ms(self) -> dict[str, float]:
        """Return the members' times; a collective's is its slowest member's, if all are known."""
        known = {node: reduced_ms(sample) for node, sample in self.samples.items()}
        times = {node: value for node, value in known.items() if value is not None}
        if not self.is_shared:
            return times
        if times.keys() != self.members:
            return {}
        return dict.fromkeys(times, max(times.values()))


def _groups(samples: Iterable[Sampled]) -> list[_Group]:
    """Return the samples by group. A round that was repeated counts as it was done last."""
    found: dict[tuple[int, str, frozenset[str]], dict[str, Sampled]] = {}
    for sample in samples:
        members = frozenset(sample.group)
        if sample.node in members:
            found.setdefault((sample.round, metric(sample), members), {})[sample.node] = sample
    return [
        _Group(round=index, probe=probe, members=members, samples=by_node)
        for (index, probe, members), by_node in found.items()
    ]


def _value(sample: Sampled, elapsed_ms: float) -> float | None:
    value = elapsed_ms
    if sample.probe in _ALLGATHERS:
        if sample.world_size < 2 or not 0 < sample.total_bytes < _IMPOSSIBLE_BYTES:
            return None
        value = allgather_busbw_gb_per_s(
            total_bytes=sample.total_bytes, ranks=sample.world_size, elapsed_ms=elapsed_ms
        )
    elif sample.probe == _MEMORY_COPY:
        value = min(sample.total_bytes, _IMPOSSIBLE_BYTES) / (elapsed_ms * 1e6)
    elif sample.probe == MATMUL:
        value = rate_gflop_per_s(flop=sample.flop, elapsed_ms=elapsed_ms)
    return value if isfinite(value) and value > 0 else None
