# SPDX-License-Identifier: Apache-2.0
"""The built-in collectors, and a site's own classes by entry points of its distributions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import one_line
from slurm_health.system.killable import Answered, Broke, run_one
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.framework import (
    DataCollector,
    Diagnostician,
    InferenceOperator,
    OperatorMaker,
)
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.containment import (
    COLLECT_LIVE_S,
    Allowance,
    AskedDiagnostician,
    InChild,
)
from slurm_health.training.monitor.every_node import EveryNode
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import (
    JobOutput,
    MonitorFindings,
    PortHolders,
    SlurmWord,
)
from slurm_health.training.monitor.nccl_ras import NcclRas

COLLECTOR_POINTS = "slurm_health.collectors"
OPERATOR_POINTS = "slurm_health.operators"
DIAGNOSTICIAN_POINTS = "slurm_health.diagnosticians"
_ROOM_S = 1.0  # for a live collector to end by itself
_LIST_S, _LOAD_S = 3.0, 3.0  # for all entry points; loading is stopped then


def after_failure(job: EndedJob) -> tuple[DataCollector, ...]:
    """Return the built-in collectors of a job whose script has failed."""
    return (
        JobOutput(job),
        SlurmWord(job),
        EveryNode(job),
        FlightDumps(job),
        MonitorFindings(job),
        PortHolders(),
    )


def while_it_hangs() -> tuple[DataCollector, ...]:
    """Return the collectors on the batch host while a training hangs, with a site's.

    Agents report ranks, connections and states of nodes.
    """
    limit_s = COLLECT_LIVE_S - _ROOM_S
    return (NcclRas(limit_s), *registered().collectors)


_BUILT_IN = (JobOutput, SlurmWord, EveryNode, FlightDumps, MonitorFindings, PortHolders, NcclRas)


@dataclass(frozen=True)
class Registered:
    """A site's own, and by name the errors of those that could not be loaded."""

    collectors: tuple[DataCollector, ...] = ()
    operators: tuple[OperatorMaker, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)


def registered(allowance: Callable[[], Allowance] = Allowance) -> Registered:
    """Return the registered ones; an operator runs in a child within its allowance.

    A diagnostician is one of the operators.
    """
    # What hangs may be the filesystem with Python.
    listed = run_one(_listed, _LIST_S)
    if not isinstance(listed, Answered):
        why = listed.reason if isinstance(listed, Broke) else f"not within {_LIST_S:g} s"
        return Registered(failed={"entry points": f"cannot be listed: {why}"})
    points = from_json(listed.data, list[tuple[str, str, str]])
    if not points:
        return Registered()
    failed: dict[str, str] = {}
    allowed = allowance()
    collectors: list[DataCollector] = []
    makers: list[tuple[str, OperatorMaker]] = []
    try:
        with _time_limit(_LOAD_S):
            collectors += _loaded(points, COLLECTOR_POINTS, DataCollector, failed)
            made = _loaded(points, OPERATOR_POINTS, InferenceOperator, failed)
            makers += ((operator.name, operator) for operator in made)
            for diagnostician in _loaded(points, DIAGNOSTICIAN_POINTS, Diagnostician, failed):
                asked = partial(AskedDiagnostician, diagnostician=diagnostician)
                makers.append((type(diagnostician).__name__, asked))
    except TimeoutError as err:  # between two of them
        failed["entry points"] = f"cannot be loaded: {err}"
    operators = tuple(
        partial(InChild, made=made, name=name, allowance=allowed) for name, made in makers
    )
    return Registered(tuple(collectors), operators, failed)


def _listed() -> bytes:
    """In a child, return the entry points: their names, values and groups."""
    from importlib.metadata import entry_points

    groups = (COLLECTOR_POINTS, OPERATOR_POINTS, DIAGNOSTICIAN_POINTS)
    points = [point for group in groups for point in entry_points(group=group)]
    return msgspec.json.encode([(point.name, point.value, point.group) for point in points])


def _loaded(
    points: Sequence[tuple[str, str, str]], group: str, kind: type, failed: dict[str, str]
) -> Iterator[Any]:
    """Yield the operator classes of a group, and instances of its other classes."""
    from importlib.metadata import EntryPoint  # it takes 1.5 MB, and most sites need none

    taken = {rule.name for rule in OPERATORS} | {collector.kind for collector in _BUILT_IN}
    for point in (EntryPoint(*point) for point in points if point[2] == group):
        try:
            loaded = point.load()
            made = loaded if kind is InferenceOperator else loaded()
        except Exception as err:  # a boundary: the module is a site's
            failed[point.name] = one_line(f"cannot be loaded: {type(err).__name__}: {err}")
            continue
        if not isinstance(loaded, type) or not issubclass(loaded, kind):
            failed[point.name] = f"cannot be loaded: it is no {kind.__name__}"
            continue
        name = getattr(loaded, "kind", "") or getattr(loaded, "name", loaded.__name__)
        if name in taken:
            failed[point.name] = f"the name {name} is taken"
            continue
        taken.add(name)
        yield made


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `limit_s`, and then once a second."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
