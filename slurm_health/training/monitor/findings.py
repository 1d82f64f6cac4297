# SPDX-License-Identifier: Apache-2.0
"""What is found while the script runs: said in the job's output, recorded, and acted on.

About a hang nothing is done, the job is cancelled or the script ended, as its user has asked.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import msgspec

from slurm_health.preflight.decide.policy import OnHang
from slurm_health.records.allocation import name_in_slurm
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.records import Action, ActionDone, ActionIntended, Record
from slurm_health.records.script_records import (
    SLOWER_STEPS,
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.report.sentences import event_text, lines_of
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.by_output import LossIsNone, observe_losses
from slurm_health.training.diagnosis.collected import FlightRecords, MonitorSaw
from slurm_health.training.diagnosis.diagnostician import (
    CauseDiagnostician,
    observe_hang,
    observe_slowdown,
)
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.seen import Standstill
from slurm_health.training.diagnosis.slow_steps import Slowdown
from slurm_health.training.diagnosis.stragglers import SlowRank, observe_slow_rank
from slurm_health.training.diagnosis.uneven import Uneven, observe_uneven
from slurm_health.training.framework import DataManager, Inference, OperatorMaker
from slurm_health.training.monitor import registry
from slurm_health.training.monitor.containment import COLLECT_LIVE_S, collect

_TITLE_WIDTH = 8
_KEPT, _MOST_KEPT = "hang-", 16  # files of stacks and records of collectives


class WatchFindings:
    """Says and records.

    Args:
        directory: of the run in the journal, None where there is none.
        environ: of the job.
        out: where it is said.
        on_hang: what is done about a hang once it was said and recorded.
    """

    def __init__(
        self,
        directory: Path | None,
        environ: Mapping[str, str],
        out: TextIO = sys.stderr,
        on_hang: Callable[[TrainingEvent, WatchFindings], None] = lambda *_: None,
    ) -> None:
        self._directory = directory
        self._environ = environ
        self._out = out
        self._on_hang = on_hang
        self._slow: list[Diagnosed] = []
        self._kept = 0

    def hang(
        self,
        standstill: Standstill,
        flights: FlightRecords,
        line: str = "",
        *,
        at_rest: bool = False,
    ) -> None:
        """Infer where a training hangs, say it, record it, and do about it what is to be done.

        `line` is the last line of output that counted, where that told of the standstill;
        `at_rest`: its main threads told of it.

        Raises:
            ScriptToEnd: the script is to be ended.
        """
        seen = [standstill, flights, MonitorSaw(slow=tuple(self._slow))]
        collectors = registry.while_it_hangs()
        live = collect(collectors, self._environ, seen, limit_s=COLLECT_LIVE_S)
        missing = {**standstill.not_seen, **live.missing}
        cause = _inferred(observe_hang, live.all, missing=missing, failed=live.failed)
        if cause is None:
            return
        hang = TrainingEvent(
            event=EventKind.HANG,
            step=standstill.step,
            nodes=cause.nodes,
            ranks=cause.ranks,
            stalled_s=round(standstill.stalled_s, 1),
            usual_s=round(standstill.allowance_s, 1),
            line=line,
            at_rest=at_rest,
            beyond_script=any(
                rank.is_beyond_script for rank in standstill.ranks if rank.rank in cause.ranks
            ),
            diagnosed=cause,
        )
        self._report(hang, "; the training seems to hang" if line else "; the training hangs")
        self._keep(standstill, flights)
        self._on_hang(hang, self)

    def _keep(self, standstill: Standstill, flights: FlightRecords) -> None:
        """Write all that was seen of the ranks beside the journal: they may be ended next."""
        if self._directory is None or self._kept >= _MOST_KEPT:
            return
        self._kept += 1
        file = self._directory / f"{_KEPT}{time.time_ns() // 10**9}.json"
        data = msgspec.json.encode({"standstill": standstill, "flights": flights})
        with contextlib.suppress(OSError), file.open("xb") as kept:
            kept.write(data)

    def slowdown(self, seen: Slowdown) -> None:
        """Infer why steps take longer than before; say it and record it if links explain it."""
        cause = _inferred(observe_slowdown, [seen])
        if cause is None or cause.cause == SLOWER_STEPS:
            return  # longer batches, an evaluation: it may be as it should
        self._slow.append(cause)
        self._report(
            TrainingEvent(
                event=EventKind.SLOWDOWN,
                nodes=cause.nodes,
                ranks=cause.ranks,
                took_ms=seen.step_ms,
                usual_ms=seen.usual_ms,
                diagnosed=cause,
            )
        )

    def slow_rank(self, slow: SlowRank, ratio: float) -> None:
        """Infer why a rank is slower than the others; say it and record it."""
        cause = _inferred(observe_slow_rank, [slow])
        self._slow += [cause] if cause else []
        self._report(
            TrainingEvent(
                event=EventKind.STRAGGLER,
                nodes=[slow.node],
                ranks=[slow.rank],
                ratio=round(ratio, 3),
                took_ms=round(slow.spent.own_ms, 1),
                usual_ms=round(slow.usual.own_ms, 1),
                diagnosed=cause,
            )
        )

    def uneven(self, uneven: Uneven) -> None:
        """Say and record that stages or batches are uneven."""
        cause = _inferred(observe_uneven, [uneven])
        if cause is not None:
            ratio = round(uneven.times, 3)
            self._report(TrainingEvent(event=EventKind.UNEVEN, ratio=ratio, diagnosed=cause))

    def loss(self, seen: LossIsNone) -> None:
        """Say and record that the loss of the training is no number any more."""
        cause = _inferred(observe_losses, [seen])
        if cause is not None:
            self._report(TrainingEvent(event=EventKind.LOSS, line=seen.line, diagnosed=cause))

    def hang_over(self, stalled_s: float, step: int) -> None:
        """Say and record that a training that hung goes on; the step is 0 where it is not known."""
        self._report(
            TrainingEvent(event=EventKind.HANG_OVER, stalled_s=round(stalled_s, 1), step=step)
        )

    def _report(self, event: TrainingEvent, conclusion: str = "") -> None:
        """Say an event with its cause in the job's output, and record it."""
        cause = lines_of(event.diagnosed) if event.diagnosed else []
        lines = (f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in cause)
        self.say(f"monitor: {event_text(event)}{conclusion}", *lines)
        self.record(event)

    def say(self, *lines: str) -> None:
        """Say lines in the job's output."""
        with contextlib.suppress(OSError):
            print(
                *(f"slurm-health: {line}" for line in lines), sep="\n", file=self._out, flush=True
            )

    def record(self, record: Record, *, lossy: bool = False) -> None:
        """Write to the journal; where that cannot be, say so, unless it may be `lossy`."""
        if self._directory is None:
            return
        try:
            journal.Writer(self._directory, journal.MONITOR, time.time).append(record)
        except JournalError as err:
            if lossy:
                return
            self.say(f"monitor: this is not recorded: {err}")


def _inferred(
    observe: Callable[[DataManager], Inference | None],
    seen: Iterable[msgspec.Struct],
    *,
    missing: Mapping[str, str] = MappingProxyType({}),
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Diagnosed | None:
    used = registry.registered()
    data = DataManager(seen, missing=missing, failed={**used.failed, **failed})
    operators: tuple[OperatorMaker, ...] = (*OPERATORS, *used.operators)
    return CauseDiagnostician(observe, operators).diagnose(data_manager=data).diagnosed


class ScriptToEnd(Exception):
    """The training hangs, and who started the monitor is to end it and to see what follows."""

    def __init__(self, hang: TrainingEvent) -> None:
        self.hang = hang
        super().__init__(hang.description)


def acting(mode: str, environ: Mapping[str, str]) -> Callable[[TrainingEvent, WatchFindings], None]:
    """Return what does about a hang what the user has asked for.

    Outside Slurm a training is stopped by what started the monitor, as where it is to restart.
    """
    job = name_in_slurm(environ)

    def act(hang: TrainingEvent, findings: WatchFindings) -> None:
        if not is_sure(hang):
            return
        if mode == OnHang.STOP.value and job:
            _cancel(job, environ, findings)
        elif mode in (OnHang.STOP.value, OnHang.RESTART.value):
            _end_script(hang, findings, mode)

    return act


def is_sure(hang: TrainingEvent) -> bool:
    """Tell whether something may be done about a hang: never on what output alone guesses.

    A job may print nothing for good reasons; so where that is all, the place must be known.
    """
    return hang.located or not hang.line


def _cancel(job: str, environ: Mapping[str, str], findings: WatchFindings) -> None:
    findings.record(ActionIntended(action=Action.CANCEL, reason="it hangs (--monitor=stop)"))
    findings.say("monitor: the job is cancelled because it hangs (--monitor=stop)")
    try:
        Client(environ).cancel(job)
    except SlurmError as err:
        findings.say(f"monitor: it could not be cancelled: {err}")
        findings.record(ActionDone(action=Action.CANCEL, succeeded=False, detail=str(err)))


def _end_script(hang: TrainingEvent, findings: WatchFindings, mode: str) -> None:
    reason = f"it hangs (--monitor={mode})"
    findings.record(ActionIntended(action=Action.END_SCRIPT, reason=reason))
    findings.say(f"monitor: the script is ended because {reason}")
    raise ScriptToEnd(hang)
