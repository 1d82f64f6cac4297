# SPDX-License-Identifier: Apache-2.0
"""The collectors, operators and diagnosticians there are: ours, and those of distributions.

What `training.plugins` defines is adapted to what is built in. Its authors see of a job a
`DataManager` with all that was collected of it: what is built in under the names of its classes
(`Standstill`, `TrainingLog`), what collectors of others gave under theirs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from slurm_health.records.script_records import NO_PROGRESS, SCRIPT_FAILED, Attribution, Sureness
from slurm_health.records.text import one_line
from slurm_health.training import plugins
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.diagnostician import ActionKind
from slurm_health.training.diagnosis.inference import ASKS_FOR, Inference, InferenceOperator
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.monitor.collector import (
    DataCollector,
    Enabled,
    EndedJob,
    LiveCollector,
    NothingCollected,
)
from slurm_health.training.monitor.every_node import EveryNode, EveryNodeNow
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import JobOutput, MonitorFindings, SlurmWord
from slurm_health.training.monitor.nccl_ras import NcclRas
from slurm_health.training.plugins.diagnosticians import diagnose
from slurm_health.training.plugins.operators import from_inside, to_inside

COLLECTOR_POINTS = "slurm_health.collectors"
OPERATOR_POINTS = "slurm_health.operators"
DIAGNOSTICIAN_POINTS = "slurm_health.diagnosticians"
COLLECTORS: tuple[DataCollector, ...] = (
    JobOutput(),
    SlurmWord(),
    EveryNode(),
    FlightDumps(),
    MonitorFindings(),
)
# While the script runs; ranks and connections are the business of each node's monitor.
LIVE_COLLECTORS: tuple[LiveCollector, ...] = (NcclRas(), EveryNodeNow())
_OF_COLLECTORS = ("name", "data", "is_enabled", "collect_data")
_OF_OPERATORS = ("name", "is_compatible", "infer")
_LOAD_S = 3.0  # for all of them; a module that takes longer is given up
# Whose doing a failure is decides what is done about it, so an action says whose it must be, and as
# surely as that takes. What is surer prevails; what is as sure and blames another decides nothing.
_MEANS = {
    ActionKind.EVENT: (Attribution.UNDECIDED, Sureness.POSSIBLE),
    ActionKind.RESTART_RANKS: (Attribution.TRANSIENT, Sureness.LIKELY),
    ActionKind.LEAVE_NODE: (Attribution.NODE, Sureness.LIKELY),
    ActionKind.STOP_JOB: (Attribution.USER, Sureness.LIKELY),
}


class Registered(NamedTuple):
    """What is used, and by name what happened to what could not be loaded."""

    collectors: tuple[DataCollector, ...]
    operators: tuple[InferenceOperator, ...]
    failed: dict[str, str]
    live: tuple[LiveCollector, ...] = LIVE_COLLECTORS


def registered() -> Registered:
    """Return ours and, behind them, an instance of each that a distribution has registered."""
    failed: dict[str, str] = {}
    with _time_limit(_LOAD_S):
        collectors = list(_made(COLLECTOR_POINTS, COLLECTORS, _OF_COLLECTORS, failed))
        operators = [*OPERATORS, *_made(OPERATOR_POINTS, OPERATORS, _OF_OPERATORS, failed)]
        operators += _made(DIAGNOSTICIAN_POINTS, operators, _OF_OPERATORS, failed)
    live = (each for each in collectors if isinstance(each, PluggedCollector))
    return Registered(
        (*COLLECTORS, *collectors), tuple(operators), failed, (*LIVE_COLLECTORS, *live)
    )


def _made(
    group: str, ours: Sequence[Any], needed: Sequence[str], failed: dict[str, str]
) -> Iterator[Any]:
    taken = {each.name for each in ours}
    for point in entry_points(group=group):
        try:
            made = _make(point, needed)
        except Exception as err:  # a boundary: the module is another's
            failed[point.name] = one_line(f"cannot be loaded: {type(err).__name__}: {err}")
            continue
        if made.name in taken:
            failed[point.name] = f"the name {made.name} is taken"
            continue
        taken.add(made.name)
        yield made


def _make(point: EntryPoint, needed: Sequence[str]) -> Any:
    made = adapted(point.load())
    missing = [name for name in needed if not hasattr(made, name)]
    if missing:
        raise TypeError(f"it has no {missing[0]}")
    return made


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """While active, what takes longer is ended by TimeoutError, once a second from then on."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"not within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Plugged(msgspec.Struct, frozen=True, kw_only=True):
    """What a collector of others collected; each has a subclass of its own."""

    kind: str
    time_s: float
    data: Any


class DiagnosisFailed(Exception):
    """A diagnostician could not do its work; says why."""


def adapted(loaded: Any) -> Any:
    """Return what is built of what an entry point names: adapted where it is of the plugins."""
    if isinstance(loaded, type) and issubclass(loaded, plugins.InferenceOperator):
        return PluggedOperator(loaded)
    made = loaded()
    if isinstance(made, plugins.DataCollector):
        return PluggedCollector(made)
    if isinstance(made, plugins.Diagnostician):
        return PluggedDiagnostician(made)
    return made


class PluggedCollector:
    """One of others: after a failure, and while a hang is looked at."""

    def __init__(self, collector: plugins.DataCollector) -> None:
        self.name = collector.kind
        made = msgspec.defstruct(collector.kind, [], bases=(Plugged,), frozen=True, kw_only=True)
        assert issubclass(made, Plugged)
        self.data: type[Plugged] = made
        self._collector = collector

    def is_enabled(self, told: EndedJob | Mapping[str, str]) -> Enabled:
        """Ask it, after it was told the job's environment."""
        self._collector.environ = told.environ if isinstance(told, EndedJob) else told
        return Enabled() if self._collector.is_enabled() else Enabled("it is not enabled here")

    def collect_data(self, _: EndedJob | Mapping[str, str], _limit_s: float = 0.0) -> Plugged:
        """Return what it collects.

        Raises:
            NothingCollected: there is nothing.
        """
        found = self._collector.collect_data()
        if found is None:
            raise NothingCollected("it found nothing")
        return self.data(kind=self.name, time_s=time.time(), data=found)


class PluggedOperator:
    """One of others, made anew for each time that it is asked."""

    def __init__(self, operator: type[plugins.InferenceOperator]) -> None:
        self.name = operator.name
        self._operator = operator

    def is_compatible(self, inference: Inference, data: Collected) -> bool:
        """Ask it."""
        return self._operator(managed(data)).is_compatible(from_inside(inference))

    def infer(self, inference: Inference, data: Collected) -> Sequence[Inference]:
        """Ask it about one inference.

        Raises:
            TypeError: it answers with something else than inferences that have names.
        """
        found = self._operator(managed(data)).infer([from_inside(inference)])
        if not all(each.name for each in found):
            raise TypeError("an inference needs a name, by which reports call it")
        return [to_inside(each) for each in found]


class PluggedDiagnostician:
    """One of others, as an operator: it leads from a symptom to what its action says of that."""

    def __init__(self, diagnostician: plugins.Diagnostician) -> None:
        self.name = type(diagnostician).__name__
        self._diagnostician = diagnostician

    def is_compatible(self, inference: Inference, _: Collected) -> bool:
        """It is asked when a script has failed, and when a training hangs."""
        return inference.name in {SCRIPT_FAILED, NO_PROGRESS}

    def infer(self, inference: Inference, data: Collected) -> Sequence[Inference]:
        """Return what the action that it asks for says; what follows is decided where it always is.

        Raises:
            DiagnosisFailed: it failed, and asks for nothing.
        """
        action = diagnose(
            self._diagnostician, data_manager=managed(data), inference=from_inside(inference)
        )
        if action.failed:
            raise DiagnosisFailed(action.failed)
        if action.kind is ActionKind.NOTHING:
            return []
        attribution, sureness = _MEANS[action.kind]
        return [
            Inference(
                name=self.name,
                description=action.reason or f"{self.name} asks for {action.kind.value}",
                attribution=attribution,
                sureness=sureness,
                nodes=action.nodes,
                evidence=action.evidence,
                configs={ASKS_FOR: action.kind.value},
            )
        ]


def managed(data: Collected) -> plugins.DataManager:
    """Return what was collected as plugins ask for it."""
    now_s = time.time()
    manager = plugins.DataManager(lambda: now_s)
    for each in data.all:
        if isinstance(each, Plugged):
            manager.store(each.kind, each.data, time_s=each.time_s)
        else:
            manager.store(type(each).__name__, each)
    return manager
