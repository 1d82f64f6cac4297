# SPDX-License-Identifier: Apache-2.0
"""What one check says of its nodes, and how that follows from its journal's records. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from statistics import median
from typing import TypeVar

import msgspec

from slurm_health.preflight.session.measurement import figures_of, group_times
from slurm_health.records import gpu_load
from slurm_health.records.probe_catalog import unit_of
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    Action,
    ActionDone,
    AgentsLost,
    DevicesWatched,
    LossCause,
    NodeHeld,
    Record,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.text import cut, one_line
from slurm_health.records.verdict import Level

# A node's name becomes a file's name. Anything else in a journal did not come from Slurm.
_NODE_NAME = re.compile(r"[\w-][\w.-]{0,254}", re.ASCII)
# What a device is called behind its model: NVML's and torch's spelling of a UUID.
_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)
_MOST_TEXT = 300
# What is measured is far below; of smaller figures every mean is a number, and no infinity.
_MOST_VALUE = 1e100
_MOST_DEVICES = 64
# Slurm's own limit of a node list, and more kinds of figures than all probes have.
_MOST_NODES = 64 * 1024
_MOST_FIGURES = 512
_KILL_WAIT_S = 30.0  # Slurm's own KillWait, from SIGTERM to SIGKILL

_R = TypeVar("_R", bound=Record)


class Signal(StrEnum):
    """Evidence against a node. LEFT_OUT follows from the others: it is shown and never counted."""

    FAULTY = "faulty"  # the check's verdict
    SLOW = "slow"  # the check's verdict
    ACCUSED = "accused"  # the post-mortem of the job's script holds it at fault
    DEVICE = "device"  # a GPU reported an error, or slowed down for heat or power
    LOST = "lost"  # its agent ended, or Slurm could not start one
    LEFT_OUT = "left out"  # the job drained it, gave it back, or was requeued without it


COUNTED = frozenset(Signal) - {Signal.LEFT_OUT}


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check says of one node.

    `slowdown` is relative to the healthy nodes of that check. `reason` is the verdict's, and what
    devices reported. `figures` has what was measured, by part ("" for the whole node, else a
    device) and by metric with its unit; `parts` the evidence against devices, by UUID if known.
    """

    node: str
    level: Level | None = None
    component: str = ""
    slowdown: float = 1.0
    reason: str = ""
    signals: tuple[Signal, ...] = ()
    figures: dict[str, dict[str, float]] = {}
    parts: dict[str, str] = {}


def node_names(start: RunStarted) -> list[str]:
    """Return the nodes of a check; names that Slurm gives no node are left out."""
    listed = dict.fromkeys(start.nodes[:_MOST_NODES])
    return [name for name in listed if _NODE_NAME.fullmatch(name)]


def observe(
    master: Sequence[Entry],
    nodes: Mapping[str, Sequence[Record]],
    post_mortem: Sequence[Record],
) -> list[Observation]:
    """Return what a check says of each of its nodes, nothing for a check that never began.

    Evidence against more than half of the nodes points at the job or at what they share, and is
    held against none of them. Agents lost in the last moments of a check without a verdict were
    lost because the job ended: it was cancelled, preempted, or out of time.

    Args:
        master: the entries of the master's file.
        nodes: the records of each node's file.
        post_mortem: the records of the post-mortem's file.
    """
    records = [entry.record for entry in master if entry.record is not None]
    start = next(iter(_all(records, RunStarted)), None)
    if start is None:
        return []
    verdict = next(iter(reversed(_all(records, VerdictReached))), None)
    judged = {one.node: one for one in verdict.nodes} if verdict else {}
    end_s = max(entry.time_s for entry in master)
    against: dict[Signal, set[str]] = {signal: set() for signal in Signal}
    for node, bad in judged.items():
        if bad.level in {Level.FAULTY, Level.SLOW}:
            against[Signal(bad.level.value)].add(node)
    for diagnosed in _all(post_mortem, Diagnosed)[-1:]:
        against[Signal.ACCUSED].update(diagnosed.accused)
    for entry in master:
        match entry.record:
            # An agent that saw no journal, or whose job had ended, does not blame its node.
            case AgentsLost(cause=LossCause.ENDED | LossCause.NOT_STARTED, nodes=lost):
                if verdict or end_s - entry.time_s >= _KILL_WAIT_S:
                    against[Signal.LOST].update(lost)
            case ActionDone(
                succeeded=True, action=Action.DRAIN | Action.DROP | Action.EXCLUDE, nodes=gone
            ):
                against[Signal.LEFT_OUT].update(gone)
    samples = [sample for own in nodes.values() for sample in _all(own, Sampled)]
    measured = figures_of(samples, verdict).by_node
    names = node_names(start)
    parts = {name: _device_events(nodes.get(name, ())) for name in names}
    against[Signal.DEVICE] = {name for name in names if parts[name]}
    accused = set().union(*(against[signal] for signal in COUNTED)).intersection(names)
    shared = len(names) > 1 and len(accused) * 2 > len(names)
    observations = []
    for name in names:
        judgement = judged.get(name)
        unhealthy = judgement is not None and judgement.level is not Level.HEALTHY
        reasons = [judgement.reason] if judgement and unhealthy and judgement.reason else []
        reasons += [held.text for held in _all(nodes.get(name, ()), NodeHeld)[-1:]]
        whole = {
            shown(f"{probe} {unit_of(probe)}"): median(kept)
            for probe, values in islice(measured.get(name, {}).items(), _MOST_FIGURES)
            if (kept := [value for value in values if value < _MOST_VALUE])
        }
        observations.append(
            Observation(
                node=name,
                level=judgement.level if judgement else None,
                component=shown(judgement.component) if judgement else "",
                slowdown=judgement.slowdown if judgement else 1.0,
                reason=shown("; ".join([*reasons, *parts[name].values()])),
                signals=tuple(
                    signal
                    for signal in Signal
                    if name in against[signal] and not (shared and signal in COUNTED)
                ),
                figures={"": whole, **_device_figures(nodes.get(name, ()))},
                parts=parts[name],
            )
        )
    return observations


def _device_events(records: Iterable[Record]) -> dict[str, str]:
    """Return what GPUs reported of themselves while under load, by UUID if it is known."""
    events: dict[str, str] = {}
    for watched in _all(records, DevicesWatched):
        for burn in watched.devices[:_MOST_DEVICES]:
            if words := gpu_load.words(burn):
                events[_uuid(burn.uuid) or f"device {burn.index}"] = shown("; ".join(words))
    return events


def _device_figures(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return what each of several devices did alone, the median over rounds."""
    ready = _all(records, WorkersReady)
    names = {
        f"device {rank}": uuid
        for rank, device in enumerate(ready[-1].devices if ready else [])
        if (uuid := _uuid(device))
    }
    values: dict[tuple[str, str], list[float]] = {}
    for sample in _all(records, Sampled):
        if sample.scope != "solo" or not 1 < len(sample.iteration_ms) <= _MOST_DEVICES:
            continue
        metric = shown(f"{sample.metric} {unit_of(sample.probe)}")
        for timed in group_times({sample.node}, [sample]):
            value, part = timed.value, timed.metric.part
            if value is not None and value < _MOST_VALUE and len(values) < _MOST_FIGURES:
                values.setdefault((names.get(part, part), metric), []).append(value)
    figures: dict[str, dict[str, float]] = {}
    for (name, metric), measured in values.items():
        figures.setdefault(name, {})[metric] = median(measured)
    return figures


def _uuid(text: str) -> str:
    match = _UUID.search(text)
    return f"GPU-{match[1].lower()}" if match else ""


def shown(text: str) -> str:
    """Return a user's text as the history keeps it: one line, and not too long."""
    return cut(one_line(text), _MOST_TEXT)


def _all(records: Iterable[Record], kind: type[_R]) -> list[_R]:
    return [record for record in records if isinstance(record, kind)]
