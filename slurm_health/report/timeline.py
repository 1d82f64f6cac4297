# SPDX-License-Identifier: Apache-2.0
"""What happened in a run and when, from all who wrote of it, and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

from slurm_health.records import records
from slurm_health.records.record_codec import Entry
from slurm_health.records.script_records import (
    REQUEUED,
    Diagnosed,
    FailurePlanned,
    ScriptEnded,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.text import duration_text
from slurm_health.records.verdict import Level
from slurm_health.report import details
from slurm_health.report.layout import Page
from slurm_health.report.model import Event, RunEntries, RunReport
from slurm_health.report.phrases import act_text, links_text, nodes_text, verb_of
from slurm_health.report.sentences import event_text

_DISPOSITIONS = {
    "proceed": "the job continues",
    "requeue": "the job will be requeued",
    "hold": "the job will be held",
    "stop": "the job ends",
}
_PLANS = {
    "stop": "the script is not started again",
    "restart": "the script is to be started again",
    "check": "nodes are to be checked before the script is started again",
    "leave": "the job is to leave nodes behind",
}


def timeline(entries: RunEntries) -> tuple[Event, ...]:
    """Return what happened, by the clocks of those who wrote it; nothing before a start.

    The master, the supervisor and the requeue helper may run on different nodes, so events of two
    writers are only as well ordered as their nodes' clocks agree.
    """
    started = [entry for entry in entries.master if isinstance(entry.record, records.RunStarted)]
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
        case records.RunStarted(nodes=nodes):
            return event(nodes=tuple(nodes))
        case records.MasterResumed():
            return event()
        case records.MasterStopped(reason=reason, job=job):
            return event(detail=f"{reason}: {job}" if job else reason)
        case records.VerdictReached(nodes=judged) as verdict:
            unwell = [node for node in judged if node.level is not Level.HEALTHY]
            return event(nodes=tuple(node.node for node in unwell), detail=_in_short(verdict))
        case records.ActionIntended(action=action, nodes=nodes, reason=reason):
            return event(action=action, nodes=tuple(nodes), detail=reason)
        case records.ActionDone(action=action, succeeded=succeeded, nodes=nodes, detail=detail):
            return event(action=action, nodes=tuple(nodes), succeeded=succeeded, detail=detail)
        case records.RunFinished(disposition=disposition, nodes=nodes):
            return event(nodes=tuple(nodes), detail=disposition)
        case TrainingEvent(nodes=nodes, diagnosed=why) as seen:
            detail = f"{event_text(seen)}: {why.description}" if why else event_text(seen)
            return event(nodes=tuple(nodes), detail=detail)
        case ScriptStarted() | ScriptEnded() | FailurePlanned() | Diagnosed() as record:
            return _script_event(record, event)
        case _:
            return None


def _in_short(verdict: records.VerdictReached) -> str:
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


def timeline_lines(runs: Sequence[RunReport], page: Page, *, verbose: bool) -> list[str]:
    """Return the timeline of every check, rounds included, if there is anything to tell."""
    if not (verbose or any(map(_is_eventful, runs))):
        return []
    rows = [["TIMELINE", "SECONDS", "EVENT"]]
    for attempt, checks in groupby(runs, key=lambda run: run.attempt):
        label = f"attempt {attempt}"
        for after_s, text in _events_of_attempt(list(checks), whole=verbose):
            rows.append([label, f"{after_s:.1f}", text])
            label = ""
    return page.table(rows, align=("left", "right")) if len(rows) > 1 else []


def _events_of_attempt(checks: Sequence[RunReport], *, whole: bool) -> list[tuple[float, str]]:
    """Return what happened in an attempt, in seconds since its first check began."""
    start_s = checks[0].started_s or 0.0
    events = []
    for run in checks:
        later_s = (run.started_s or start_s) - start_s
        which = f"check {run.check}: " if run.check > 1 else ""
        events += [
            (later_s + after_s, f"{which}{text}") for after_s, text in events_of(run, whole=whole)
        ]
    return sorted(events, key=lambda event: event[0])


def events_of(run: RunReport, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return what happened in a check and when, rounds included; of these all groups if `whole`."""
    told = run.timeline if whole else _without_echoes(run.timeline)
    events = [(event.after_s, _text(event, run)) for event in told]
    events += [
        (each.after_s, details.round_text(run, each, whole=whole)) for each in run.each_round
    ]
    return sorted(events, key=lambda event: event[0])


def _without_echoes(events: Sequence[Event]) -> list[Event]:
    """Return events without plans of acts whose result is told, and ends that acts have told."""
    done = {event.action for event in events if event.what == "action_done"}
    return [
        event
        for event in events
        if not (event.what == "action_intended" and event.action in done)
        and not (event.what == "run_finished" and event.detail in done)
    ]


def _is_eventful(run: RunReport) -> bool:
    """Tell whether a check led to more than that the job went on."""
    ill = any(node.level not in (Level.HEALTHY, None) for node in run.nodes)
    return acted(run.timeline) or ill or bool(run.paths or run.leaves or run.post_mortem)


def _text(event: Event, run: RunReport) -> str:
    nodes, verb = nodes_text(event.nodes), verb_of(event.action)
    match event.what:
        case "job_started":
            return f"started by Slurm after {duration_text(float(event.detail))} in the queue"
        case "run_started":
            return f"began to check {nodes}"
        case "master_stopped":
            return f"the check was stopped by {event.detail}"
        case "master_resumed":
            return "a new master took over"
        case "verdict_reached":
            return f"verdict: {event.detail}"
        case "action_intended":
            return f"going to {act_text(verb.plain, event.action, event.nodes)}"
        case "action_done":
            words = verb.done if event.succeeded else verb.failed
            said = f" ({event.detail})" if event.detail else ""
            return act_text(words, event.action, event.nodes) + said
        case "run_finished":
            on = f" with {nodes}" if nodes else ""
            return f"{_DISPOSITIONS.get(event.detail, event.detail)}{on}"
        case _:
            return _script_text(event, run)


def _script_text(event: Event, run: RunReport) -> str:
    match event.what:
        case "diagnosed":
            return f"post-mortem: {event.detail}"
        case "requeued":
            return event.detail
        case "script_started":
            on = f" on {nodes_text(event.nodes)}" if event.nodes else ""
            again = f" again{on}" if event.action else ""
            return f"{(run.script.name if run.script else '') or 'the script'} started{again}"
        case "failure_planned":
            plan, _, reason = event.detail.partition(": ")
            return f"{_PLANS.get(plan, plan)}: {reason}"
        case "script_ended":
            return f"the script ended, {event.detail}"
        case "training_event":
            return f"monitor: {event.detail}"
        case _:
            return f"{event.what.replace('_', ' ')} {event.detail}".rstrip()
