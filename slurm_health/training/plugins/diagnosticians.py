# SPDX-License-Identifier: Apache-2.0
"""Diagnosticians that others write: they observe a problem, and ask for an action about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from slurm_health.training.diagnosis.diagnostician import ActionKind
from slurm_health.training.plugins.data import DataCollector, DataManager

__all__ = [
    "ActionKind",
    "DiagnosisAction",
    "DiagnosisManager",
    "DiagnosisObservation",
    "Diagnostician",
    "EventAction",
    "LeaveNode",
    "NoAction",
    "RestartRanks",
    "StopJob",
    "diagnose",
]


@dataclass(frozen=True)
class DiagnosisObservation:
    """A problem, as `resolve` knows it again, and what was seen of it."""

    observation: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DiagnosisAction:
    """What a diagnostician asks for: data, that others carry out.

    Args:
        reason: why, the end of a sentence.
        evidence: the lines and figures that this rests on.
        failed: why no diagnosis was made, where none was.
    """

    kind: ClassVar[ActionKind]
    reason: str = ""
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    failed: str = ""

    @property
    def is_the_masters(self) -> bool:
        """Whether it is about the whole job, and no agent of one node carries it out."""
        return self.kind in {ActionKind.LEAVE_NODE, ActionKind.STOP_JOB}


@dataclass(frozen=True, kw_only=True)
class NoAction(DiagnosisAction):
    """Nothing is to be done."""

    kind = ActionKind.NOTHING


@dataclass(frozen=True, kw_only=True)
class EventAction(DiagnosisAction):
    """It is to be recorded and reported."""

    kind = ActionKind.EVENT


@dataclass(frozen=True, kw_only=True)
class RestartRanks(DiagnosisAction):
    """The ranks are to be started again where they ran."""

    kind = ActionKind.RESTART_RANKS


@dataclass(frozen=True, kw_only=True)
class LeaveNode(DiagnosisAction):
    """The job is to go on without `nodes`, which `evidence` accuses."""

    kind = ActionKind.LEAVE_NODE

    def __post_init__(self) -> None:
        if not self.nodes or not self.evidence:
            raise ValueError("no node is left without its name, and evidence against it")


@dataclass(frozen=True, kw_only=True)
class StopJob(DiagnosisAction):
    """The job is to end: the same again would fail again."""

    kind = ActionKind.STOP_JOB


class Diagnostician:
    """Finds out about one kind of failure; to be subclassed.

    In `kwargs` are `data_manager`, what was collected, and in a job `inference`, its symptom.
    """

    def observe(self, **_kwargs: Any) -> DiagnosisObservation | None:
        """Return the problem that is there, None where there is none."""
        return DiagnosisObservation("unknown")

    def resolve(self, problem: DiagnosisObservation, **_kwargs: Any) -> DiagnosisAction:
        """Return what is to be done about a problem."""
        return EventAction(reason=problem.observation)

    def diagnose(self, **kwargs: Any) -> DiagnosisAction:
        """Observe and resolve; a diagnosis that fails is no action.

        One that has to observe several times for one failure overrides this.
        """
        try:
            problem = self.observe(**kwargs)
            return NoAction() if problem is None else self.resolve(problem, **kwargs)
        except Exception as err:  # a boundary: a diagnosis costs no training
            return _no_action(err)


def diagnose(diagnostician: Diagnostician, **kwargs: Any) -> DiagnosisAction:
    """Return the action that a diagnostician asks for, whatever its `diagnose` does."""
    try:
        action = diagnostician.diagnose(**kwargs)
    except Exception as err:  # a boundary, for those that override it
        return _no_action(err)
    if not isinstance(action, DiagnosisAction):
        return NoAction(failed=f"it answered with {type(action).__name__} instead of an action")
    return action


def _no_action(err: Exception) -> NoAction:
    return NoAction(failed=f"{type(err).__name__}: {err}")


@dataclass
class _Registered:
    does: DataCollector | Diagnostician
    every_s: float
    next_s: float


class DiagnosisManager:
    """Has collectors collect and diagnosticians observe, each again and again at its own times.

    Who calls `look` carries out what is asked for.
    """

    def __init__(self, data_manager: DataManager, clock: Callable[[], float]) -> None:
        self._data_manager = data_manager
        self._clock = clock
        self._registered: dict[str, _Registered] = {}
        self.failed: dict[str, str] = {}  # collectors that raised last time, and what

    def register_collector(self, collector: DataCollector, every_s: float) -> None:
        """Have it collect every so many seconds, from now on."""
        self._register(collector.kind, collector, every_s)

    def register_diagnostician(
        self, name: str, diagnostician: Diagnostician, every_s: float
    ) -> None:
        """Have it observe every so many seconds, from now on."""
        self._register(name, diagnostician, every_s)

    def look(self) -> dict[str, DiagnosisAction]:
        """Collect, then diagnose, what is due; return by name what diagnosticians ask for."""
        now_s = self._clock()
        due = {n: each for n, each in self._registered.items() if each.next_s <= now_s}
        for name, each in due.items():
            each.next_s = now_s + each.every_s
            if isinstance(each.does, DataCollector):
                self._collect(name, each.does)
        return {
            name: diagnose(each.does, data_manager=self._data_manager)
            for name, each in due.items()
            if isinstance(each.does, Diagnostician)
        }

    def _register(self, name: str, does: DataCollector | Diagnostician, every_s: float) -> None:
        if name in self._registered:
            raise ValueError(f"{name} is registered already; give it another name")
        self._registered[name] = _Registered(does, every_s, self._clock())

    def _collect(self, name: str, collector: DataCollector) -> None:
        self.failed.pop(name, None)
        try:
            data = collector.collect_data() if collector.is_enabled() else None
        except Exception as err:  # a boundary: the others still collect
            self.failed[name] = f"{type(err).__name__}: {err}"
            return
        if data is not None:
            self._data_manager.store(name, data)
