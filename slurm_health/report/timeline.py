# SPDX-License-Identifier: Apache-2.0
"""When a check did what: every intent, act and result, in seconds from its start. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.core.record_lines import Entry
from slurm_health.core.records import (
    ActionDone,
    ActionIntended,
    MasterResumed,
    RunFinished,
    RunStarted,
    ScriptEnded,
    ScriptStarted,
    VerdictReached,
)
from slurm_health.core.verdict import Level
from slurm_health.report.model import Event, RunEntries


def timeline(entries: RunEntries) -> tuple[Event, ...]:
    """Return what happened, by the clocks of those who wrote it; nothing before a start.

    The master, the supervisor and the requeue helper may run on different nodes, so events of two
    writers are only as well ordered as their nodes' clocks agree.
    """
    started = [entry for entry in entries.master if isinstance(entry.record, RunStarted)]
    if not started:
        return ()
    start_s = started[0].time_s
    written = sorted(
        [*entries.master, *entries.supervisor, *entries.requeue], key=lambda entry: entry.time_s
    )
    return tuple(event for entry in written if (event := _event(entry, start_s)) is not None)


def acted(events: Sequence[Event]) -> bool:
    """Tell whether anything was done beyond letting the job go on."""
    return any(event.action not in {"", "proceed"} for event in events)


def _event(entry: Entry, start_s: float) -> Event | None:
    after_s = round(entry.time_s - start_s, 3)
    what = entry.kind
    match entry.record:
        case RunStarted(nodes=nodes):
            return Event(after_s=after_s, what=what, nodes=tuple(nodes))
        case MasterResumed():
            return Event(after_s=after_s, what=what)
        case VerdictReached(nodes=judged):
            unwell = [node for node in judged if node.level is not Level.HEALTHY]
            names = tuple(node.node for node in unwell)
            said = ", ".join(f"{node.node} {node.level.value}" for node in unwell)
            return Event(after_s=after_s, what=what, nodes=names, detail=said or "all healthy")
        case ActionIntended(action=action, nodes=nodes, reason=reason):
            return Event(
                after_s=after_s, what=what, action=action, nodes=tuple(nodes), detail=reason
            )
        case ActionDone(action=action, succeeded=succeeded, nodes=nodes, detail=detail):
            return Event(
                after_s=after_s,
                what=what,
                action=action,
                nodes=tuple(nodes),
                succeeded=succeeded,
                detail=detail,
            )
        case RunFinished(disposition=disposition, nodes=nodes):
            return Event(after_s=after_s, what=what, nodes=tuple(nodes), detail=disposition)
        case ScriptStarted(script=script):
            return Event(after_s=after_s, what=what, detail=script)
        case ScriptEnded(exit_code=code, signal=number):
            how = f"signal {number}" if number else f"exit {code}"
            return Event(after_s=after_s, what=what, detail=how)
        case _:
            return None
