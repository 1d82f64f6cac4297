# SPDX-License-Identifier: Apache-2.0
"""What one check says of one node: the values, and how they come of its journal's records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import TypeVar

import msgspec

from slurm_health.preflight.session.measurement import rate_gflop_per_s, typical_ms
from slurm_health.records import gpu_load
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    Action,
    ActionDone,
    AgentsLost,
    DevicesWatched,
    LossCause,
    Record,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.text import cut, one_line
from slurm_health.records.verdict import Level, NodeVerdict

# A node's name becomes a file's name. Anything else in a journal did not come from Slurm.
NODE_NAME = re.compile(r"[\w-][\w.-]{0,254}", re.ASCII)
# What a device is called behind its model: NVML's and torch's spelling of a UUID.
_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.IGNORECASE)
_LENGTH = 300
# More bytes than any machine has: such a record is foreign, and could not become a float.
_IMPOSSIBLE_BYTES = 2**63
_MOST_DEVICES = 64
# Slurm's own limit of a node list, and more kinds of figures than all probes have.
_MOST_NODES = 64 * 1024
_MOST_FIGURES = 512
_KILL_WAIT_S = 30.0  # Slurm's own KillWait, from SIGTERM to SIGKILL
_LEFT_OUT = {Action.DRAIN, Action.DROP, Action.EXCLUDE}

_R = TypeVar("_R", bound=Record)


class Signal(StrEnum):
    """What speaks against a node.

    LEFT_OUT follows from the others and is shown, never counted.
    """

    FAULTY = "faulty"  # the check's verdict
    SLOW = "slow"  # the check's verdict
    ACCUSED = "accused"  # the post-mortem of the job's script holds it at fault
    DEVICE = "device"  # a GPU reported an error, or slowed down for heat or power
    LOST = "lost"  # its agent ended, or Slurm could not start one
    LEFT_OUT = "left out"  # the job drained it, gave it back, or was requeued without it


# What is measured is far below; of smaller figures every mean is a number, and no infinity.
MOST_VALUE = 1e100
COUNTED = frozenset(Signal) - {Signal.LEFT_OUT}


class CheckFigure(msgspec.Struct, frozen=True, array_like=True):
    """What one check measured. `part` is empty for the node as a whole; `metric` names the unit."""

    part: str
    metric: str
    value: float


class Observation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check says of one node.

    `model` is what its accelerators are; empty where it has none, or that is not known.
    `slowdown` is relative to the healthy nodes of that check. `said` is the verdict's reason, or
    what the signals are. `parts` says of devices what spoke against them, by UUID where known.
    `ran_s` is how long the job's script then ran there, as far as it is known to have ended.
    """

    node: str
    model: str = ""
    level: Level | None = None
    component: str = ""
    slowdown: float = 1.0
    said: str = ""
    signals: tuple[Signal, ...] = ()
    figures: tuple[CheckFigure, ...] = ()
    parts: dict[str, str] = {}
    ran_s: float = 0.0


class CheckSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One check: `label` is its directory's name, `time_s` when it began."""

    label: str
    time_s: float
    seen: tuple[Observation, ...]


class JobSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a job's journal says.

    `stamp` changes when it does; with this stamp it is final from `final_s` on. `trouble` says why
    a part of it could not be read.
    """

    uid: int
    stamp: str
    final_s: float
    checks: tuple[CheckSeen, ...] = ()
    trouble: str = ""


# From when on a job is final that has been looked at since it was: it is not looked at again.
SETTLED_S = 0.0
# From when on a job is final that could not be read: it is looked at again until it can be.
NEVER_S = 1e15


UNCHANGED = JobSeen(uid=-1, stamp="", final_s=NEVER_S)
"""Stands for a job that has not changed since it was read."""


def unread(trouble: str, *, uid: int = -1, stamp: str = "") -> JobSeen:
    """Return what is known of a job that could not be read, which is tried again.

    With a stamp that waits until the stamp changes.
    """
    return JobSeen(uid=uid, stamp=stamp, final_s=NEVER_S, trouble=trouble)


def observations(
    master: Sequence[Record],
    nodes: Mapping[str, Sequence[Record]],
    post_mortem: Sequence[Record],
    figures: Mapping[str, Sequence[CheckFigure]],
) -> list[Observation]:
    """Return what a check says of each of its nodes; nothing where it never began.

    What speaks against more than half of its nodes speaks against the job or against what they
    share, and is held against none of them.

    Args:
        master: the records of the master's file.
        nodes: those of each node's.
        post_mortem: those of the post-mortem's.
        figures: what was measured on each node as a whole.
    """
    start = next(iter(_all(master, RunStarted)), None)
    if start is None:
        return []
    listed = dict.fromkeys(start.nodes[:_MOST_NODES])
    names = [name for name in listed if NODE_NAME.fullmatch(name)]
    verdicts = _all(master, VerdictReached)
    judged = {each.node: each for each in (verdicts[-1].nodes if verdicts else [])}
    against = _against(master, post_mortem, judged)
    seen = []
    for name in names:
        own = nodes.get(name, ())
        parts = _device_events(own)
        signals = {signal for signal, accused in against.items() if name in accused}
        if parts:
            signals.add(Signal.DEVICE)
        verdict = judged.get(name)
        seen.append(
            Observation(
                node=name,
                model=_model(own),
                level=verdict.level if verdict else None,
                component=shown(verdict.component) if verdict else "",
                slowdown=verdict.slowdown if verdict else 1.0,
                said=_said(verdict, parts),
                signals=tuple(each for each in Signal if each in signals),
                figures=(*figures.get(name, ()), *_device_figures(own))[:_MOST_FIGURES],
                parts=parts,
            )
        )
    return _forgive_common(seen)


def without_job_end(master: Sequence[Entry]) -> list[Record]:
    """Return a master's records without the agents that it lost while its job ended.

    A job that is cancelled, preempted or out of time loses its agents, and its master, within the
    time that Slurm gives to processes. A check whose last words are these has no verdict.
    """
    records = [entry.record for entry in master if entry.record is not None]
    if any(isinstance(record, VerdictReached) for record in records):
        return records
    ends_s = max((entry.time_s for entry in master), default=0.0)
    return [
        entry.record
        for entry in master
        if entry.record is not None
        and not (isinstance(entry.record, AgentsLost) and ends_s - entry.time_s < _KILL_WAIT_S)
    ]


def _against(
    master: Sequence[Record], post_mortem: Sequence[Record], judged: Mapping[str, NodeVerdict]
) -> dict[Signal, set[str]]:
    # Where an agent saw no journal, or the job had ended, the node was not at fault.
    causes = {LossCause.ENDED, LossCause.NOT_STARTED}
    acts = [act for act in _all(master, ActionDone) if act.succeeded and act.action in _LEFT_OUT]
    diagnosed = _all(post_mortem, Diagnosed)[-1:]
    return {
        Signal.FAULTY: {node for node, each in judged.items() if each.level is Level.FAULTY},
        Signal.SLOW: {node for node, each in judged.items() if each.level is Level.SLOW},
        Signal.ACCUSED: {node for each in diagnosed for node in each.accused},
        Signal.LOST: {
            node for lost in _all(master, AgentsLost) if lost.cause in causes for node in lost.nodes
        },
        Signal.LEFT_OUT: {node for act in acts for node in act.nodes},
    }


def _forgive_common(seen: list[Observation]) -> list[Observation]:
    bad = sum(bool(COUNTED.intersection(each.signals)) for each in seen)
    if len(seen) == 1 or bad * 2 <= len(seen):
        return seen
    kept = {Signal.LEFT_OUT}
    return [
        msgspec.structs.replace(each, signals=tuple(kept.intersection(each.signals)))
        for each in seen
    ]


def _device_events(records: Iterable[Record]) -> dict[str, str]:
    """Return what GPUs reported of themselves while under load, by UUID where it is known."""
    said: dict[str, str] = {}
    for watched in _all(records, DevicesWatched):
        for burn in watched.devices[:_MOST_DEVICES]:
            words = gpu_load.words(burn)
            if words:
                name = _uuid(burn.uuid) or f"device {burn.index}"
                said[name] = shown("; ".join(words))
    return said


def _model(records: Sequence[Record]) -> str:
    ready = _all(records, WorkersReady)
    return shown(ready[-1].model) if ready and not ready[-1].on_cpus else ""


def _device_figures(records: Sequence[Record]) -> list[CheckFigure]:
    """Return what each device did alone, the median over rounds, where there are several."""
    ready = _all(records, WorkersReady)
    names = [_uuid(each) for each in (ready[-1].devices if ready else [])]
    values: dict[tuple[str, str], list[float]] = {}
    for sample in _all(records, Sampled):
        if sample.scope != "solo" or not 1 < len(sample.iteration_ms) <= _MOST_DEVICES:
            continue
        metric = shown(str(sample.metric))
        for rank, elapsed_ms in enumerate(typical_ms(sample)):
            unit, value = _measured(sample, elapsed_ms)
            if value is not None:
                name = (names[rank] if rank < len(names) else "") or f"device {rank}"
                values.setdefault((name, f"{metric} {unit}"), []).append(value)
    return [CheckFigure(name, metric, median(each)) for (name, metric), each in values.items()]


def _measured(sample: Sampled, elapsed_ms: float | None) -> tuple[str, float | None]:
    """Return the unit and the value of what a device did; None where it did nothing."""
    if elapsed_ms is None:
        return "", None
    unit, value = "ms", elapsed_ms
    if sample.flop > 0:
        unit, value = "GFLOP/s", rate_gflop_per_s(flop=sample.flop, elapsed_ms=elapsed_ms)
    elif sample.total_bytes > 0:
        copied = min(sample.total_bytes, _IMPOSSIBLE_BYTES)
        unit, value = "GB/s", copied / (elapsed_ms * 1e6)
    return unit, value if value < MOST_VALUE else None


def _said(verdict: NodeVerdict | None, parts: Mapping[str, str]) -> str:
    told = verdict.reason if verdict and verdict.level is not Level.HEALTHY else ""
    return shown("; ".join([*([told] if told else []), *parts.values()]))


def _uuid(text: str) -> str:
    found = _UUID.search(text)
    return f"GPU-{found[1].lower()}" if found else ""


def shown(text: str) -> str:
    """Return a user's text as the history keeps it: one line, and not too long."""
    return cut(one_line(text), _LENGTH)


def _all(records: Iterable[Record], kind: type[_R]) -> list[_R]:
    return [record for record in records if isinstance(record, kind)]
