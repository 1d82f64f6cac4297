# SPDX-License-Identifier: Apache-2.0
"""How far a job has got, in one line that `report --follow` shows above its report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from slurm_health.records import records
from slurm_health.records.record_codec import Entry
from slurm_health.records.script_records import (
    EventKind,
    ProgressSeen,
    ScriptEnded,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.text import cut, duration_text
from slurm_health.report.model import RunEntries
from slurm_health.system import journal

R = TypeVar("R", bound=records.Record)
# The script of a job that was submitted begins within this of the check's end. A check by hand has
# none that this knows of.
_SCRIPT_S = 10.0
_LINE_CHARACTERS = 80  # of a line of output


class JobActivity(NamedTuple):
    """What is going on in a check or its job, and whether nothing more will come of it."""

    text: str
    over: bool = False


def script_end(supervisor: Sequence[Entry]) -> ScriptEnded | None:
    """Return how the script ended, None where it has not, or was started again since."""
    of_script = [e.record for e in supervisor if isinstance(e.record, ScriptStarted | ScriptEnded)]
    last = of_script[-1] if of_script else None
    return last if isinstance(last, ScriptEnded) else None


def followed(runs: Sequence[RunEntries]) -> RunEntries:
    """Return the run of a job that tells how far it has got: the last one, but for one case.

    A script that is started again after a check is told of where it was started first.
    """
    last = runs[-1]
    attempt = journal.attempt_and_check(last.label)
    for run in reversed(runs[:-1]):
        before = journal.attempt_and_check(run.label)
        if not run.supervisor or not attempt or not before or before[0] != attempt[0]:
            continue
        since = bool(last.master) and run.supervisor[-1].time_s >= last.master[-1].time_s
        return run if since else last
    return last


def progress(run: RunEntries, now_s: float) -> JobActivity:
    """Return how far the latest check of a job, and then its script, have got at `now_s`."""
    script = _last(run.supervisor, ScriptStarted)
    ended = script_end(run.supervisor)
    if ended is not None:
        how = f"signal {ended.signal}" if ended.signal else f"exit {ended.exit_code}"
        return JobActivity(
            f"the script ended after {duration_text(ended.duration_s)}, {how}", over=True
        )
    if script is not None:
        since_s = next(e.time_s for e in run.supervisor if e.record is script)
        return JobActivity(
            f"the script {_stands(run, now_s)}has run for {duration_text(now_s - since_s)}"
            + "".join(f"; {text}" for text in [so_far(run, now_s)] if text)
        )
    finished = _last(run.master, records.RunFinished)
    if finished is not None:
        if finished.disposition.leaves:
            return JobActivity("the check has ended; the job waits for its next attempt")
        ended_s = next(e.time_s for e in run.master if e.record is finished)
        stopped = finished.disposition is records.Disposition.STOP
        return JobActivity("the check has ended", over=stopped or now_s - ended_s > _SCRIPT_S)
    start = _last(run.master, records.RunStarted)
    if start is None:
        return JobActivity("waiting for the check to begin")
    began_s = next(e.time_s for e in run.master if e.record is start)
    return JobActivity(
        f"{_step(run, start)}, {duration_text(now_s - began_s)} since the check began"
    )


def so_far(run: RunEntries, now_s: float) -> str:
    """Return how far a script without a heartbeat is that runs, empty where nothing is known."""
    begun_s = max(
        (e.time_s for e in run.supervisor if isinstance(e.record, ScriptStarted)), default=None
    )
    if begun_s is None or script_end(run.supervisor) is not None:
        return ""
    seen = [e for e in run.monitor if isinstance(e.record, ProgressSeen) and e.time_s >= begun_s]
    if not seen or not isinstance(last := seen[-1].record, ProgressSeen) or last.beating:
        return ""
    ago_s = max(0.0, now_s - seen[-1].time_s)
    counted = "no line of the output counts steps so far"
    if last.line:
        age = duration_text(last.age_s + ago_s) if ago_s + last.age_s >= 1 else "a moment"
        counted = f"step {last.step}, seen {age} ago ({cut(last.line, _LINE_CHARACTERS)!r})"
    held = [f"rank {rank}" for rank in last.stopped]
    are = "is" if len(held) == 1 else "are"
    stopped = [f"{', '.join(held)} on {last.node} {are} stopped"] if held else []
    return "; ".join(["no heartbeat", counted, *stopped])


def _stands(run: RunEntries, now_s: float) -> str:
    """Return for how long a script has stood still that hangs, as the monitor saw it last."""
    hangs = (EventKind.HANG, EventKind.HANG_OVER)
    for last in reversed(run.monitor):
        if isinstance(last.record, TrainingEvent) and last.record.event in hangs:
            if last.record.event is EventKind.HANG_OVER:
                return ""
            stalled_s = last.record.stalled_s + now_s - last.time_s
            return f"hangs, no step for {duration_text(stalled_s)}; it "
    return ""


def _step(run: RunEntries, start: records.RunStarted) -> str:
    if _last(run.master, records.VerdictReached) is not None:
        return "acting on the verdict"
    rounds = [e.record for e in run.master if isinstance(e.record, records.RoundStarted)]
    if not rounds:
        started = [
            _last(entries, records.WorkersReady) is not None for entries in run.nodes.values()
        ]
        failed = [
            _last(entries, records.WorkersFailed) is not None for entries in run.nodes.values()
        ]
        unusable = f", {sum(failed)} unusable" if any(failed) else ""
        return f"loading: {sum(started)} of {len(start.nodes)} nodes ready{unusable}"
    current = rounds[-1]
    if any(e.round == current.round for e in _all(run.master, records.RoundEnded)):
        return f"round {current.round} has ended"
    reported = {
        each.node
        for entries in run.nodes.values()
        for each in _all(entries, records.NodeReported)
        if each.round == current.round
    }
    done = sum(reported.issuperset(group) for group in current.groups)
    what = "nodes" if all(len(group) == 1 for group in current.groups) else "pairs"
    return f"round {current.round}: {done} of {len(current.groups)} {what} done"


def _all(entries: Sequence[Entry], kind: type[R]) -> list[R]:
    return [entry.record for entry in entries if isinstance(entry.record, kind)]


def _last(entries: Sequence[Entry], kind: type[R]) -> R | None:
    return next(reversed(_all(entries, kind)), None)
