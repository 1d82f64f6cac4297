# SPDX-License-Identifier: Apache-2.0
"""Events of a training: the watch infers their causes, reports, records and acts.

After a hang it does nothing, cancels the job or ends the script, as the user has chosen.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

import msgspec

from slurm_health.preflight.decide.policy import OnHang
from slurm_health.preflight.supervisor.recorder import log_lines
from slurm_health.records.allocation import name_in_slurm
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.records.records import Action, ActionDone, ActionIntended, Record
from slurm_health.records.script_records import (
    SLOWER_STEPS,
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.report.sentences import ends_for_hang, event_line, lines_of
from slurm_health.system import journal, owner
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.collected import FlightRecords, MonitorReport
from slurm_health.training.diagnosis.diagnostician import CauseDiagnostician
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.diagnosis.output_lines import NonFiniteLoss
from slurm_health.training.diagnosis.pace import PaceFinding, observe_pace
from slurm_health.training.diagnosis.pulse import Resumed
from slurm_health.training.diagnosis.samples import Standstill
from slurm_health.training.framework import DataManager
from slurm_health.training.monitor import registry
from slurm_health.training.monitor.containment import COLLECT_LIVE_S, collect

_TITLE_WIDTH = 8
_KEPT, _MOST_KEPT = "hang-", 16  # files of stacks and records of collectives


class ScriptToEnd(Exception):
    """The training hangs, and the starter of the watch has to end it."""

    def __init__(self, hang: TrainingEvent) -> None:
        self.hang = hang
        super().__init__(hang.description)


class Events:
    """Reports, records and acts.

    Args:
        directory: of the run in the journal, None if there is none.
        environ: of the job.
        out: the file for reports; None: the machine's log.
        on_hang: acts on a hang that was reported and recorded; raises ScriptToEnd.
    """

    def __init__(
        self,
        directory: Path | None,
        environ: Mapping[str, str],
        out: TextIO | None = sys.stderr,
        on_hang: Callable[[TrainingEvent, Events], None] = lambda *_: None,
    ) -> None:
        self._directory = directory
        self._environ = environ
        self._out = out
        self._on_hang = on_hang
        self._slow: list[Diagnosed] = []
        self._kept = 0

    def hang(self, standstill: Standstill, data: Iterable[msgspec.Struct] = ()) -> None:
        """Infer where a training hangs, with other collected data, and report it.

        Raises:
            ScriptToEnd: the script has to be ended.
        """
        records = tuple(rank.flight for rank in standstill.ranks if rank.flight is not None)
        flights = FlightRecords(records=records)
        known = [standstill, flights, MonitorReport(slow=tuple(self._slow)), *data]
        live = collect(registry.while_it_hangs(), self._environ, known, limit_s=COLLECT_LIVE_S)
        live.missing.update(standstill.unavailable)
        site = registry.registered()
        live.failed.update(site.failed)
        cause = HangDiagnostician(site.operators).diagnose(data_manager=live).diagnosed
        if cause is None:
            return
        at_fault = [rank for rank in standstill.ranks if rank.rank in cause.ranks]
        hang = TrainingEvent(
            event=EventKind.HANG,
            step=standstill.step,
            nodes=cause.nodes,
            ranks=cause.ranks,
            stalled_s=standstill.stalled_s,
            usual_s=standstill.allowance_s,
            line=standstill.line,
            at_rest=standstill.at_rest,
            beyond_script=any(rank.is_beyond_script for rank in at_fault),
            diagnosed=cause,
        )
        self._report(hang)
        self._keep(standstill, flights)
        self._on_hang(hang, self)

    def _keep(self, standstill: Standstill, flights: FlightRecords) -> None:
        """Write all data about the ranks beside the journal: they may be ended next."""
        if self._directory is None or self._kept >= _MOST_KEPT:
            return
        self._kept += 1
        file = self._directory / f"{_KEPT}{time.time_ns() // 10**9}.json"
        data = msgspec.json.encode({"standstill": standstill, "flights": flights})
        with contextlib.suppress(OSError), file.open("xb") as kept:
            kept.write(data)

    def pace(self, observed: PaceFinding | NonFiniteLoss) -> None:
        """Infer why a rank is slow, steps take longer, work is uneven, or the loss is NaN."""
        site = registry.registered()
        data = DataManager([observed], failed=site.failed)
        diagnostician = CauseDiagnostician(observe_pace, (*OPERATORS, *site.operators))
        cause = diagnostician.diagnose(data_manager=data).diagnosed
        if cause is None or cause.cause == SLOWER_STEPS:
            return  # longer batches, an evaluation: it may be normal
        if isinstance(observed, NonFiniteLoss):
            event = TrainingEvent(event=EventKind.LOSS, step=observed.step, line=observed.first)
        elif observed.event is EventKind.UNEVEN:
            event = TrainingEvent(event=observed.event, ratio=round(observed.ratio, 3))
        else:
            self._slow.append(cause)
            of_rank = observed.event is EventKind.STRAGGLER
            cost, usual = observed.cost, observed.usual
            event = TrainingEvent(
                event=observed.event,
                nodes=cause.nodes,
                ranks=cause.ranks,
                took_ms=round(cost.own_ms if of_rank else cost.step_ms, 1),
                usual_ms=round(usual.own_ms if of_rank else usual.step_ms, 1),
                ratio=round(observed.ratio, 3),
            )
        self._report(msgspec.structs.replace(event, diagnosed=cause))

    def resumed(self, resumed: Resumed) -> None:
        """Report that a training that hung goes on."""
        self._report(
            TrainingEvent(
                event=EventKind.HANG_OVER,
                stalled_s=round(resumed.stalled_s, 1),
                step=resumed.step,
            )
        )

    def _report(self, event: TrainingEvent) -> None:
        """Write an event with its cause to the job's output, and record it."""
        cause = lines_of(event.diagnosed) if event.diagnosed else []
        lines = [f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in cause]
        self.say(event_line(event), *lines)
        self.record(event)
        if event.event is EventKind.HANG:
            text = "\n".join((event_line(event), *lines))
            owner.tell("hang", event_line(event), text, self._environ)

    def say(self, text: str, *lines: str) -> None:
        """Write to the job's output, or to the machine's log."""
        if self._out is None:
            log_lines("\n".join((f"monitor: {text}", *lines)))
            return
        with contextlib.suppress(OSError):
            print(
                *(f"slurm-health: {line}" for line in (f"monitor: {text}", *lines)),
                sep="\n",
                file=self._out,
                flush=True,
            )

    def record(self, record: Record, *, lossy: bool = False) -> None:
        """Write to the journal; report a failure, unless the record may be `lossy`."""
        if self._directory is None:
            return
        try:
            journal.Writer(self._directory, journal.MONITOR, time.time).append(record)
        except JournalError as err:
            if not lossy:
                self.say(f"this is not recorded: {err}")


def acting(mode: str, environ: Mapping[str, str]) -> Callable[[TrainingEvent, Events], None]:
    """Return the action on a hang that the user has chosen.

    Output alone is not enough: a job may print nothing for good reasons, so the place must be
    known. Outside Slurm the starter of the watch stops a training, as for a restart.
    """
    job = name_in_slurm(environ)

    def act(hang: TrainingEvent, events: Events) -> None:
        if mode not in {OnHang.STOP.value, OnHang.RESTART.value}:
            return
        if hang.line and not hang.located:
            return
        reason = ends_for_hang(mode)
        if mode != OnHang.STOP.value or not job:
            events.record(ActionIntended(action=Action.END_SCRIPT, reason=reason))
            events.say(f"the script is ended because {reason}")
            raise ScriptToEnd(hang)
        events.record(ActionIntended(action=Action.CANCEL, reason=reason))
        events.say(f"the job is cancelled because {reason}")
        try:
            Client(environ).cancel(job)
        except SlurmError as err:
            events.say(f"it could not be cancelled: {err}")
            events.record(ActionDone(action=Action.CANCEL, succeeded=False, detail=str(err)))

    return act
