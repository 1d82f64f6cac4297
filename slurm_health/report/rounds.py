# SPDX-License-Identifier: Apache-2.0
"""The rounds of a check, and the parts of its nodes, from the entries of a journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.records import records
from slurm_health.records.gpu_load import Burn, words
from slurm_health.records.record_codec import Entry
from slurm_health.records.verdict import Outcome

# What is said of a group of which members say different things: the first of these.
_WORST_FIRST = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NOT_RUN, Outcome.MEASURED)


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
