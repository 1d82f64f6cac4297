# SPDX-License-Identifier: Apache-2.0
"""What was measured, from the entries of a journal: figures, rounds, and the parts of nodes.

One value per probe, node, group and round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from slurm_health.preflight.session.measurement import (
    allgather_busbw_gb_per_s,
    group_times,
    rate_gflop_per_s,
)
from slurm_health.records.gpu_load import Burn, words
from slurm_health.records.probe_catalog import Metric
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    DevicesWatched,
    GroupAborted,
    NodeReported,
    RoundEnded,
    RoundStarted,
    RunStarted,
    Sampled,
    WorkersReady,
)
from slurm_health.records.verdict import Outcome

ALLGATHER = "allgather"
MATMUL = "matmul"
_ALLGATHERS = frozenset({ALLGATHER, "rail_allgather", "node_allgather"})
_COPIES = frozenset({"memory_copy", "host_copy"})
_UNITS = {MATMUL: "GFLOP/s", **dict.fromkeys(_COPIES | _ALLGATHERS, "GB/s")}
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63
# What is said of a group of which members say different things: the first of these.
_WORST_FIRST = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NOT_RUN, Outcome.MEASURED)


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
    began: dict[int, tuple[float, RoundStarted]] = {}
    ended: dict[int, tuple[float, RoundEnded]] = {}
    aborted: dict[tuple[int, tuple[str, ...]], GroupAborted] = {}
    for entry in master:
        match entry.record:
            case RoundStarted() as record:
                began[record.round] = entry.time_s, record
                ended.pop(record.round, None)
            case RoundEnded() as record:
                ended[record.round] = entry.time_s, record
            case GroupAborted() as record:
                aborted[record.round, tuple(record.group)] = record
    start_s = next((e.time_s for e in master if isinstance(e.record, RunStarted)), None)
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


def _reports(nodes: Mapping[str, Sequence[Entry]]) -> dict[int, dict[str, NodeReported]]:
    """Return each node's last word on each round."""
    found: dict[int, dict[str, NodeReported]] = {}
    for entries in nodes.values():
        for entry in entries:
            if isinstance(entry.record, NodeReported):
                found.setdefault(entry.record.round, {})[entry.record.node] = entry.record
    return found


def _group(
    nodes: tuple[str, ...],
    reports: Mapping[str, NodeReported],
    aborted: GroupAborted | None,
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
    ready: WorkersReady | None = None
    burns: dict[int, Burn] = {}
    said: dict[int, dict[str, None]] = {}
    for entry in entries:
        if isinstance(entry.record, WorkersReady):
            ready = entry.record
        elif isinstance(entry.record, DevicesWatched):
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
