# SPDX-License-Identifier: Apache-2.0
"""What was measured, from the entries of a journal: figures, rounds, and the parts of nodes.

One value per probe, node, group and round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

from slurm_health.preflight.session.measurement import (
    Timed,
    allgather_busbw_gb_per_s,
    group_times,
    rate_gflop_per_s,
)
from slurm_health.records import records
from slurm_health.records.gpu_load import Burn, words
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.record_codec import Entry
from slurm_health.records.verdict import Level, Outcome

ALLGATHER = "allgather"
MATMUL = "matmul"
_PRODUCTS = frozenset({MATMUL, "matmul_fp8"})
_ALLGATHERS = frozenset({ALLGATHER, "rail_allgather", "node_allgather"})
_COPIES = frozenset({"memory_copy", "host_copy", "peer_copy", "ib_write_bw"})
_UNITS = {
    **dict.fromkeys(_PRODUCTS, "GFLOP/s"),
    **dict.fromkeys(_COPIES | _ALLGATHERS, "GB/s"),
}
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63
# What is said of a group of which members say different things: the first of these.
_WORST_FIRST = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NOT_RUN, Outcome.MEASURED)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What one probe measured on one node, one value per group the node was in, by round.

    An all-gather is its bus bandwidth in GB/s, a copy within a device what it reads and writes in
    GB/s, one from or to the host or another device what it brings, a product of matrices the rate
    in GFLOP/s, any other probe its time in ms. A value that was not measured is not there.
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


def figure_key(probe: str) -> str:
    """Return a figure's name with its unit: `allgather_gb_per_s`."""
    unit = unit_of(probe).lower().replace("/", "_per_")
    return f"{probe.replace(' ', '_')}_{unit}"


class Figures(NamedTuple):
    """What was measured, in the units of `Figure`: of each node, and of each node in each round.

    `by_node` has what says something about the node, `by_round` all, by a round's number and a
    node's name.
    """

    by_node: Mapping[str, tuple[Figure, ...]]
    by_round: Mapping[tuple[int, str], Mapping[str, float]]


def figures_of(
    samples: Iterable[records.Sampled], verdict: records.VerdictReached | None = None
) -> Figures:
    """Return the figures of a run, by probe name.

    A healthy node's figure with a bad partner, or over a bad path, says nothing about the node,
    so such groups are left out of it where the whole group was measured together.

    Args:
        samples: all samples of the run, of all nodes.
        verdict: says which nodes and paths are well, None while there is none.
    """
    judged, bad = (verdict.nodes, verdict.paths) if verdict else ([], [])
    fit = {each.node for each in judged if each.level is Level.HEALTHY}
    paths = [frozenset(path.ends) for path in bad]
    values: dict[str, dict[str, list[float]]] = {}
    by_round: dict[tuple[int, str], dict[str, float]] = {}
    for number, members, group in _groups(samples):
        all_well = members <= fit and not any(ends <= members for ends in paths)
        for timed in _whole(group_times(members, group)):
            value = _value(timed.sample, timed.elapsed_ms)
            if value is None:
                continue
            node, probe = timed.sample.node, str(timed.sample.metric)
            by_round.setdefault((number, node), {})[probe] = value
            if all_well or not timed.together or node not in fit:
                values.setdefault(node, {}).setdefault(probe, []).append(value)
    by_node = {
        node: tuple(Figure(probe=name, values=tuple(probes[name])) for name in sorted(probes))
        for node, probes in values.items()
    }
    return Figures(by_node, by_round)


_Group = tuple[int, frozenset[str], list[records.Sampled]]


def _groups(samples: Iterable[records.Sampled]) -> list[_Group]:
    """Return the members of each group of each round with their samples, round by round."""
    found: dict[tuple[int, frozenset[str]], list[records.Sampled]] = {}
    for sample in samples:
        found.setdefault((sample.round, frozenset(sample.group)), []).append(sample)
    in_order = sorted(found.items(), key=lambda item: item[0][0])
    return [(number, members, group) for (number, members), group in in_order]


def _whole(times: Iterable[Timed]) -> Iterable[Timed]:
    """Return the times of whole nodes: that of the slowest of a node's devices or rails."""
    slowest: dict[tuple[str, Metric, bool], Timed] = {}
    for timed in times:
        key = timed.sample.node, timed.sample.metric, timed.together
        if key not in slowest or timed.elapsed_ms > slowest[key].elapsed_ms:
            slowest[key] = timed
    return slowest.values()


def _value(sample: records.Sampled, elapsed_ms: float) -> float | None:
    value = elapsed_ms
    if sample.probe in _ALLGATHERS:
        if sample.world_size < 2 or not 0 < sample.total_bytes < _IMPOSSIBLE_BYTES:
            return None
        value = allgather_busbw_gb_per_s(
            total_bytes=sample.total_bytes, ranks=sample.world_size, elapsed_ms=elapsed_ms
        )
    elif sample.probe in _COPIES:
        value = min(sample.total_bytes, _IMPOSSIBLE_BYTES) / (elapsed_ms * 1e6)
    elif sample.probe in _PRODUCTS:
        value = rate_gflop_per_s(flop=sample.flop, elapsed_ms=elapsed_ms)
    return value if isfinite(value) and value > 0 else None


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """One group of one round. `outcome` is None while none of its nodes has reported.

    `elapsed_s` is how long the round took for each of `nodes`, None for one that has not.
    `details` are what nodes said of it and why the master ended it, `silent` the nodes that did
    not answer.
    """

    nodes: tuple[str, ...]
    outcome: Outcome | None
    elapsed_s: tuple[float | None, ...]
    details: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round. `phase` is what was tested in it, `probes` what was run.

    It began `after_s` seconds after the start of the check; `duration_s` is None while it lasts.
    """

    round: int
    phase: str
    probes: tuple[str, ...]
    after_s: float
    duration_s: float | None
    groups: tuple[GroupReport, ...]


def rounds_of(
    master: Sequence[Entry], nodes: Mapping[str, Sequence[Entry]], *, void: frozenset[int]
) -> tuple[RoundReport, ...]:
    """Return the rounds in their order, but for `void` ones; one begun again counts once."""
    began: dict[int, tuple[float, records.RoundStarted]] = {}
    ended: dict[int, tuple[float, records.RoundEnded]] = {}
    aborted: dict[tuple[int, tuple[str, ...]], records.GroupAborted] = {}
    for entry in master:
        match entry.record:
            case records.RoundStarted() as record:
                began[record.round] = entry.time_s, record
                ended.pop(record.round, None)
            case records.RoundEnded() as record:
                ended[record.round] = entry.time_s, record
            case records.GroupAborted() as record:
                aborted[record.round, tuple(record.group)] = record
    start_s = next((e.time_s for e in master if isinstance(e.record, records.RunStarted)), None)
    reports = _reports(nodes)
    return tuple(
        RoundReport(
            round=number,
            phase=record.phase,
            probes=tuple(probe.name for probe in record.probes),
            after_s=round(time_s - (time_s if start_s is None else start_s), 3),
            duration_s=round(ended[number][0] - time_s, 3) if number in ended else None,
            groups=tuple(
                _group(
                    tuple(group),
                    reports.get(number, {}),
                    aborted.get((number, tuple(group))),
                    silent=frozenset(ended[number][1].silent if number in ended else ())
                    | frozenset(record.absent),
                )
                for group in record.groups
            ),
        )
        for number, (time_s, record) in sorted(began.items())
        if number not in void
    )


def _reports(nodes: Mapping[str, Sequence[Entry]]) -> dict[int, dict[str, records.NodeReported]]:
    """Return each node's last word on each round."""
    found: dict[int, dict[str, records.NodeReported]] = {}
    for entries in nodes.values():
        for entry in entries:
            if isinstance(entry.record, records.NodeReported):
                found.setdefault(entry.record.round, {})[entry.record.node] = entry.record
    return found


def _group(
    nodes: tuple[str, ...],
    reports: Mapping[str, records.NodeReported],
    aborted: records.GroupAborted | None,
    *,
    silent: frozenset[str],
) -> GroupReport:
    own = [reports[node] for node in nodes if node in reports]
    outcomes = {report.outcome for report in own}
    if aborted is not None and aborted.timed_out:
        outcomes.add(Outcome.TIMED_OUT)
    if silent & set(nodes):
        outcomes.add(Outcome.NOT_RUN)
    said = [f"{report.node}: {report.detail}" for report in own if report.detail]
    return GroupReport(
        nodes=nodes,
        outcome=next((outcome for outcome in _WORST_FIRST if outcome in outcomes), None),
        elapsed_s=tuple(
            round(reports[node].elapsed_ms / 1000, 4) if node in reports else None for node in nodes
        ),
        details=(*said, *([aborted.reason] if aborted is not None else [])),
        silent=tuple(node for node in nodes if node in silent),
    )


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One GPU as the driver names it. `said` is what it reported of itself under load."""

    index: int
    uuid: str
    pci_address: str
    said: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a node computes with, and over which network interface it reached the others."""

    model: str
    interface: str
    devices: tuple[DeviceReport, ...] = ()


def hardware_of(entries: Sequence[Entry]) -> Hardware | None:
    """Return what a node said of its parts, None where its workers were never ready."""
    ready: records.WorkersReady | None = None
    burns: dict[int, Burn] = {}
    said: dict[int, dict[str, None]] = {}
    for entry in entries:
        if isinstance(entry.record, records.WorkersReady):
            ready = entry.record
        elif isinstance(entry.record, records.DevicesWatched):
            for burn in entry.record.devices:
                burns[burn.index] = burn
                said.setdefault(burn.index, {}).update(dict.fromkeys(words(burn)))
    if ready is None:
        return None
    devices = tuple(
        DeviceReport(index=index, uuid=burn.uuid, pci_address=burn.bus, said=tuple(said[index]))
        for index, burn in sorted(burns.items())
    )
    return Hardware(model=ready.model, interface=ready.interface, devices=devices)
