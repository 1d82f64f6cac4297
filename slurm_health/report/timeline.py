# SPDX-License-Identifier: Apache-2.0
"""What happened in a run and when, from all who wrote of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    ActionDone,
    ActionIntended,
    MasterResumed,
    MasterStopped,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.script_records import (
    REQUEUED,
    Diagnosed,
    FailurePlanned,
    HangFound,
    HangOver,
    ScriptEnded,
    ScriptStarted,
    SlowdownFound,
    StragglerFound,
)
from slurm_health.records.verdict import Level
from slurm_health.report.model import Event, RunEntries
from slurm_health.report.phrases import links_text, nodes_text


def timeline(entries: RunEntries) -> tuple[Event, ...]:
    """Return what happened, by the clocks of those who wrote it; nothing before a start.

    The master, the supervisor and the requeue helper may run on different nodes, so events of two
    writers are only as well ordered as their nodes' clocks agree.
    """
    started = [entry for entry in entries.master if isinstance(entry.record, RunStarted)]
    if not started:
        return ()
    start_s = started[0].time_s
    events = (_event(entry, start_s) for entry in written(entries))
    return tuple(event for event in events if event is not None)


def written(entries: RunEntries) -> list[Entry]:
    """Return what was written on the job as a whole, by time."""
    writers = (entries.master, entries.supervisor, entries.requeue, entries.post_mortem)
    all_of_them = (*writers, entries.restart, entries.monitor)
    return sorted(
        (entry for writer in all_of_them for entry in writer), key=lambda entry: entry.time_s
    )


def acted(events: Sequence[Event]) -> bool:
    """Tell whether anything was done beyond letting the job go on."""
    return any(event.action not in {"", "proceed"} for event in events)


def _event(entry: Entry, start_s: float) -> Event | None:
    event = partial(Event, after_s=round(entry.time_s - start_s, 3), what=entry.kind)
    match entry.record:
        case RunStarted(nodes=nodes):
            return event(nodes=tuple(nodes))
        case MasterResumed():
            return event()
        case MasterStopped(reason=reason):
            return event(detail=reason)
        case VerdictReached(nodes=judged) as verdict:
            unwell = [node for node in judged if node.level is not Level.HEALTHY]
            return event(nodes=tuple(node.node for node in unwell), detail=_in_short(verdict))
        case ActionIntended(action=action, nodes=nodes, reason=reason):
            return event(action=action, nodes=tuple(nodes), detail=reason)
        case ActionDone(action=action, succeeded=succeeded, nodes=nodes, detail=detail):
            return event(action=action, nodes=tuple(nodes), succeeded=succeeded, detail=detail)
        case RunFinished(disposition=disposition, nodes=nodes):
            return event(nodes=tuple(nodes), detail=disposition)
        case HangFound() | HangOver() | SlowdownFound() | StragglerFound() as record:
            return _monitor_event(record, event)
        case ScriptStarted() | ScriptEnded() | FailurePlanned() | Diagnosed() as record:
            return _script_event(record, event)
        case _:
            return None


def _in_short(verdict: VerdictReached) -> str:
    """Return what is at which level: `n[3-4] faulty, n7 slow, path n1–n2 faulty`."""  # noqa: RUF002
    levels = {
        level: [node.node for node in verdict.nodes if node.level is level]
        for level in (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE)
    }
    said = [f"{nodes_text(nodes)} {level.value}" for level, nodes in levels.items() if nodes]
    return ", ".join([*(said or ["all healthy"]), *links_text(verdict.paths, verdict.leaves)])


def _script_event(
    record: ScriptStarted | ScriptEnded | FailurePlanned | Diagnosed, event: Callable[..., Event]
) -> Event:
    match record:
        case ScriptStarted(script=script, restart=0):
            return event(detail=script)
        case ScriptStarted(script=script, nodes=nodes):
            return event(detail=script, nodes=tuple(nodes), action="restart")
        case ScriptEnded(exit_code=code, signal=number):
            return event(detail=f"signal {number}" if number else f"exit {code}")
        case Diagnosed(description=description, cause=cause) if cause == REQUEUED:
            return event(what=REQUEUED, detail=description)
        case Diagnosed(description=description):
            return event(detail=description)
        case FailurePlanned(plan=plan, reason=reason, nodes=nodes):
            return event(detail=f"{plan}: {reason}", nodes=tuple(nodes))


def _monitor_event(
    record: HangFound | HangOver | SlowdownFound | StragglerFound, event: Callable[..., Event]
) -> Event:
    match record:
        case HangFound(stalled_s=stalled_s, found=found):
            return event(nodes=tuple(found.nodes), detail=f"{stalled_s:.0f} s: {found.description}")
        case HangOver(stalled_s=stalled_s):
            return event(detail=f"{stalled_s:.0f} s")
        case SlowdownFound(found=found):
            return event(nodes=tuple(found.nodes), detail=found.description)
        case StragglerFound(node=node, found=Diagnosed(description=description)):
            return event(nodes=(node,), detail=description)
        case StragglerFound(node=node, rank=rank):
            return event(nodes=(node,), detail=f"rank {rank} on {node} is slower than the others")
