# SPDX-License-Identifier: Apache-2.0
"""Collectors, operators and diagnosticians of `training.plugins`, as those that are built in.

What they see of a job is a `DataManager` with all that was collected of it: what is built in under
the names of its classes (`Standstill`, `TrainingLog`), what collectors of others gave under theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slurm_health.records.script_records import NO_PROGRESS, SCRIPT_FAILED, Attribution, Sureness
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.diagnostician import ActionKind
from slurm_health.training.diagnosis.inference import ASKS_FOR, Inference
from slurm_health.training.monitor.collector import Enabled, EndedJob, NothingCollected
from slurm_health.training.plugins import DataCollector, DataManager, diagnosticians
from slurm_health.training.plugins.operators import InferenceOperator, from_inside, to_inside

# Whose doing a failure is decides what is done about it, so an action says whose it must be, and as
# surely as that takes. What is surer prevails; what is as sure and blames another decides nothing.
_MEANS = {
    ActionKind.EVENT: (Attribution.UNDECIDED, Sureness.POSSIBLE),
    ActionKind.RESTART_RANKS: (Attribution.TRANSIENT, Sureness.LIKELY),
    ActionKind.LEAVE_NODE: (Attribution.NODE, Sureness.LIKELY),
    ActionKind.STOP_JOB: (Attribution.USER, Sureness.LIKELY),
}


class Plugged(msgspec.Struct, frozen=True, kw_only=True):
    """What a collector of others collected; each has a subclass of its own."""

    kind: str
    time_s: float
    data: Any


class DiagnosisFailed(Exception):
    """A diagnostician could not do its work; says why."""


def adapted(loaded: Any) -> Any:
    """Return what is built of what an entry point names: adapted where it is of the plugins."""
    if isinstance(loaded, type) and issubclass(loaded, InferenceOperator):
        return PluggedOperator(loaded)
    made = loaded()
    if isinstance(made, DataCollector):
        return PluggedCollector(made)
    if isinstance(made, diagnosticians.Diagnostician):
        return PluggedDiagnostician(made)
    return made


class PluggedCollector:
    """One of others: after a failure, and while a hang is looked at."""

    def __init__(self, collector: DataCollector) -> None:
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

    def __init__(self, operator: type[InferenceOperator]) -> None:
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

    def __init__(self, diagnostician: diagnosticians.Diagnostician) -> None:
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
        action = diagnosticians.diagnose(
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


def managed(data: Collected) -> DataManager:
    """Return what was collected as plugins ask for it."""
    now_s = time.time()
    manager = DataManager(lambda: now_s)
    for each in data.all:
        if isinstance(each, Plugged):
            manager.store(each.kind, each.data, time_s=each.time_s)
        else:
            manager.store(type(each).__name__, each)
    return manager
