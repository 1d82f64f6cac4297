# SPDX-License-Identifier: Apache-2.0
"""The collectors, operators and diagnosticians there are: ours, and those of distributions."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Any, NamedTuple

from slurm_health.records.text import one_line
from slurm_health.training.diagnosis.inference import InferenceOperator
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.monitor.collector import DataCollector, LiveCollector
from slurm_health.training.monitor.every_node import EveryNode, EveryNodeNow
from slurm_health.training.monitor.flight_dumps import FlightDumps
from slurm_health.training.monitor.job_collectors import JobOutput, MonitorFindings, SlurmWord
from slurm_health.training.monitor.nccl_ras import NcclRas
from slurm_health.training.monitor.plugged import PluggedCollector, adapted

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
