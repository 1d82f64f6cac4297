# SPDX-License-Identifier: Apache-2.0
"""What is found while the script runs: said in the job's output, and recorded."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import msgspec

from slurm_health.records.errors import JournalError
from slurm_health.records.records import Record
from slurm_health.records.script_records import (
    SLOWER_STEPS,
    Diagnosed,
    HangFound,
    HangOver,
    SlowdownFound,
    StragglerFound,
)
from slurm_health.report.post_mortem import lines_of
from slurm_health.system import journal
from slurm_health.training.diagnosis.chain import InferenceChain
from slurm_health.training.diagnosis.collected import Collected, FlightRecords, MonitorSaw
from slurm_health.training.diagnosis.diagnostician import (
    Diagnostician,
    observe_hang,
    observe_slowdown,
)
from slurm_health.training.diagnosis.inference import Inference
from slurm_health.training.diagnosis.seen import Standstill
from slurm_health.training.diagnosis.slow_network import Slowdown
from slurm_health.training.diagnosis.slow_rank import SlowRank, observe_slow_rank
from slurm_health.training.monitor import registry
from slurm_health.training.monitor.containment import collect_live, contained

_TITLE_WIDTH = 8


class Findings:
    """Says and records.

    Args:
        directory: of the run in the journal, None where there is none.
        environ: of the job.
        out: where it is said.
    """

    def __init__(
        self, directory: Path | None, environ: Mapping[str, str], out: TextIO = sys.stderr
    ) -> None:
        self._directory = directory
        self._environ = environ
        self._out = out
        self._slow: list[Diagnosed] = []

    def hang(
        self, standstill: Standstill, flights: FlightRecords, line: str = ""
    ) -> HangFound | None:
        """Infer where a training hangs, say it and record it; None where nothing is inferred.

        `line` is the last line of output that counted, where that told of the standstill.
        """
        seen = [standstill, flights, MonitorSaw(slow=tuple(self._slow))]
        live = collect_live(self._environ, registry.LIVE_COLLECTORS, seen)
        missing = {**standstill.not_seen, **live.missing}
        found = _inferred(observe_hang, live.all, missing=missing, failed=live.failed)
        if found is None:
            return None
        hang = HangFound(
            stalled_s=round(standstill.stalled_s, 1),
            allowance_s=round(standstill.allowance_s, 1),
            step=standstill.step,
            line=line,
            found=found,
        )
        said = f"no step for {hang.stalled_s:.0f} s, the last was {hang.step}; the training hangs"
        if line:
            said = (
                f"no line that counts steps for {hang.stalled_s:.0f} s, the last was {line!r}, and"
                " no process of the job works; the training seems to hang"
            )
        self.say(f"monitor: {said}", *_titled(found))
        self.record(hang)
        return hang

    def slowdown(self, seen: Slowdown) -> None:
        """Infer why steps take longer than before; say it and record it if links explain it."""
        found = _inferred(observe_slowdown, [seen])
        if found is None or found.cause == SLOWER_STEPS:
            return  # longer batches, an evaluation: it may be as it should
        self.say(
            f"monitor: a step takes {seen.step_ms:.0f} ms instead of {seen.usual_ms:.0f}",
            *_titled(found),
        )
        self._slow.append(found)
        self.record(SlowdownFound(step_ms=seen.step_ms, usual_ms=seen.usual_ms, found=found))

    def slow_rank(self, slow: SlowRank, ratio: float) -> None:
        """Infer why a rank is slower than the others; say it and record it."""
        found = _inferred(observe_slow_rank, [slow])
        self._slow += [found] if found else []
        own_ms, usual_ms = slow.spent.own_ms, slow.usual.own_ms
        self.say(
            f"monitor: rank {slow.rank} on {slow.node} is slower than the others:"
            f" {own_ms:.0f} ms of its own per step, {usual_ms:.0f} ms usual",
            *(_titled(found) if found else ()),
        )
        self.record(
            StragglerFound(
                node=slow.node,
                rank=slow.rank,
                ratio=round(ratio, 3),
                own_ms=round(own_ms, 1),
                usual_ms=round(usual_ms, 1),
                found=found,
            )
        )

    def hang_over(self, stalled_s: float, step: int) -> None:
        """Say and record that a training that hung goes on."""
        self.say(f"monitor: the training goes on after {stalled_s:.0f} s, at step {step}")
        self.record(HangOver(stalled_s=round(stalled_s, 1), step=step))

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
    observe: Callable[[Collected], Inference | None],
    seen: Iterable[msgspec.Struct],
    *,
    missing: Mapping[str, str] = MappingProxyType({}),
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Diagnosed | None:
    used = registry.registered()
    chain = InferenceChain(used.operators, apply=contained())
    data = Collected(seen, missing=missing, failed={**used.failed, **failed})
    return Diagnostician(observe, chain).diagnose(data).diagnosed


def _titled(found: Diagnosed) -> Iterator[str]:
    return (f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in lines_of(found))
