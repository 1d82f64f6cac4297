# SPDX-License-Identifier: Apache-2.0
"""The story of a job, from the entries of its journals alone. Pure: no file, no clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import TypeVar

from msgspec.structs import replace

from slurm_health.preflight.session.measurement import figures_of
from slurm_health.records import records, script_records
from slurm_health.records.gpu_load import words
from slurm_health.records.probe_catalog import ALLGATHER
from slurm_health.records.record_codec import Entry
from slurm_health.records.script_records import (
    REQUEUED,
    Attribution,
    Diagnosed,
    EventKind,
    ProgressSeen,
    ScriptEnded,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.text import duration_text
from slurm_health.records.verdict import Level, LinkVerdict, Outcome
from slurm_health.report import sentences
from slurm_health.report.acts import acts_of
from slurm_health.report.story import (
    Act,
    Device,
    Event,
    Group,
    Hardware,
    Node,
    Phase,
    Progress,
    Round,
    Run,
    RunEntries,
    Script,
    State,
    Story,
)
from slurm_health.system import journal

# A master that is silent for longer is dead: a waiting one writes every ten seconds by its own
# clock, an acting one waits for Slurm.
_SILENCE_S = 120.0
_ACTING_S = 900.0
_CLOCK_S = 5.0  # Slurm's times are whole seconds, and clocks of two machines differ
# The watch records progress at least once a minute (`training.monitor.watch`).
_BLIND_S = 300.0
_PACED = 6  # records of progress from which the pace of a training comes
# The outcome of a group whose members report different ones is the first of these.
_WORST_FIRST = (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.NOT_RUN, Outcome.MEASURED)

R = TypeVar("R", bound=records.Record)


def story_of(runs: Sequence[RunEntries], *, now_s: float | None = None) -> Story:
    """Return the story of one job.

    Args:
        runs: the entries of its checks, at least one, oldest first.
        now_s: the time, to tell a running check from one whose master died; without it an
            unfinished check is taken to run.
    """
    attempts = [(journal.attempt_and_check(run.label) or (0, 1))[0] for run in runs]
    # What a check puts back into the queue may be the script that an earlier one let start.
    ours = {
        attempt
        for run, attempt in zip(runs, attempts, strict=True)
        if _requeues(acts_of([*run.master, *run.requeue]))
    }
    checks = []
    for index, entries in enumerate(runs):
        queued_from_s = None  # of the first check of an attempt
        if index and attempts[index] == attempts[index - 1] + 1:
            queued_from_s = max((entry.time_s for entry in runs[index - 1].written), default=None)
        elif index == 0 and attempts[0] == 0:
            started = _first(entries.master, records.RunStarted)
            queued_from_s = started.submit_time_s if started else None
        checks.append(
            run_of(
                entries,
                now_s=now_s,
                superseded=index + 1 < len(runs),
                requeued=max(attempts) > attempts[index],
                ours=attempts[index] in ours,
                queued_from_s=queued_from_s,
            )
        )
    start = next((run.started for run in reversed(checks) if run.started), None)
    nodes: dict[str, Node] = {}
    paths: dict[frozenset[str], LinkVerdict] = {}
    for run in checks:
        for node in run.nodes:
            before = nodes.get(node.node)
            # A healthy node may be lost later. A check that could not decide clears no fault.
            fault = before is not None and before.level in (Level.FAULTY, Level.SLOW)
            undecided = node.level is Level.INCONCLUSIVE and fault
            if before is None or before.level is None or (node.level and not undecided):
                nodes[node.node] = node
        if run.judged:  # a path stands until a later verdict on both of its ends
            judged = {node.node for node in run.nodes if node.level}
            paths = {ends: path for ends, path in paths.items() if not ends <= judged}
        paths |= {frozenset(path.ends): path for path in run.paths}
    name = next((run.script.name for run in reversed(checks) if run.script), "")
    return Story(
        # Its directory is named by Slurm; the job id in its records is only their owner's word.
        job=runs[-1].task or journal.job_of(runs[0].job),
        cluster=runs[0].cluster,
        partition=start.partition if start else "",
        name=start.job_name if start else "",
        script=name or _script_name(start),
        user=start.user if start else "",
        now_s=now_s,
        runs=tuple(checks),
        nodes=tuple(nodes.values()),
        paths=tuple(paths.values()),
        leaves=tuple({leaf.ends: leaf for run in checks for leaf in run.leaves}.values()),
    )


def run_of(
    entries: RunEntries,
    *,
    now_s: float | None = None,
    superseded: bool = False,
    requeued: bool = False,
    ours: bool = False,
    queued_from_s: float | None = None,
) -> Run:
    """Return the part of one check in its job's story.

    Args:
        entries: those of its files.
        now_s: see `story_of`.
        superseded: a later check of the job exists, so this one is over.
        requeued: a later attempt of the job exists, so a requeue that was begun took effect.
        ours: a check of its attempt put the job back into the queue.
        queued_from_s: when its attempt was put into the queue, None for a further check in one.
    """
    master = entries.master
    attempt, check = journal.attempt_and_check(entries.label) or (0, 1)
    start, verdict = _first(master, records.RunStarted), _last(master, records.VerdictReached)
    finished = _last(master, records.JobOutcome) or records.JobOutcome(
        disposition=records.Disposition(""), exit_code=0
    )
    state, note = _state(entries, superseded=superseded, now_s=now_s)
    queued_s = None
    if start is not None and queued_from_s is not None:
        # Until Slurm started it, or if that is unknown (before 23.02), until its check began.
        waited_s = (start.start_time_s or master[0].time_s) - queued_from_s
        queued_s = round(max(0.0, waited_s), 1) if waited_s > -_CLOCK_S else None
    judged_s = [e.time_s for e in master if isinstance(e.record, records.VerdictReached)]
    took_s = judged_s[-1] - master[0].time_s if judged_s else -1.0
    since_s = max(_times(entries.supervisor, ScriptStarted), default=0.0)
    post_mortem = _last([e for e in entries.post_mortem if e.time_s >= since_s], Diagnosed)
    of_nodes = (entry.record for node in entries.nodes.values() for entry in node)
    samples = [s for s in of_nodes if isinstance(s, records.Sampled)]
    figures = figures_of(samples, verdict)
    acts = acts_of([*master, *entries.requeue])
    ours |= _requeues(acts)
    if requeued:  # a requeue that was begun took effect
        acts = [
            replace(act, progress=Progress.DONE)
            if act.action == "requeue" and act.progress is Progress.INTENDED
            else act
            for act in acts
        ]
    by_others = ""  # how others put the job back into the queue
    outside = post_mortem is not None and post_mortem.attribution == Attribution.OUTSIDE
    if post_mortem and not ours and (post_mortem.cause == REQUEUED or (requeued and outside)):
        by_others = post_mortem.description
    elif requeued and not ours:
        by_others = "the job was requeued by Slurm or by a person"
    return Run(
        run=entries.label,
        attempt=attempt,
        check=check,
        state=state,
        note=note,
        superseded=superseded,
        started=start,
        started_s=master[0].time_s if master else None,
        queued_s=queued_s,
        duration_s=round(took_s, 4) if took_s >= 0.0 else None,  # a clock may go back
        judged=verdict is not None,
        nodes=_nodes(entries, start, verdict, figures.by_node),
        paths=tuple(verdict.paths) if verdict else (),
        leaves=tuple(verdict.leaves) if verdict else (),
        floors=verdict.floors if verdict else {},
        unseen=verdict.unseen if verdict else "",
        storage=tuple(verdict.storage) if verdict else (),
        actions=tuple(acts),
        disposition=finished.disposition,
        reason=finished.reason,
        exit_code=finished.exit_code if finished.disposition else None,
        unchecked=_last(master, records.Unchecked),
        script=_script(entries, start, None if superseded else now_s),
        post_mortem=None if post_mortem and post_mortem.cause == REQUEUED else post_mortem,
        events=tuple(_all(entries.monitor, TrainingEvent)),
        since_start=sum(time_s < since_s for time_s in _times(entries.monitor, TrainingEvent)),
        requeued=by_others,
        timeline=tuple(_timeline(entries, start, queued_s)),
        rounds=tuple(_rounds(entries, figures.by_round)),
        life=tuple(_life(entries, start, queued_s, None if superseded else now_s)),
        missing=entries.missing,
    )


def _all(entries: Iterable[Entry], kind: type[R]) -> list[R]:
    return [entry.record for entry in entries if isinstance(entry.record, kind)]


def _first(entries: Iterable[Entry], kind: type[R]) -> R | None:
    return next(iter(_all(entries, kind)), None)


def _last(entries: Iterable[Entry], kind: type[R]) -> R | None:
    return next(reversed(_all(entries, kind)), None)


def _times(entries: Iterable[Entry], kind: type[records.Record]) -> list[float]:
    return [entry.time_s for entry in entries if isinstance(entry.record, kind)]


# --- how far it got ------------------------------------------------------------------------------


def _state(entries: RunEntries, *, superseded: bool, now_s: float | None) -> tuple[State, str]:
    """Return how far a check got, and that in words if it has not finished."""
    master = entries.master
    start = _first(master, records.RunStarted)
    if start is None:
        return State.NOT_STARTED, "no start of a check is recorded"
    if _first(master, records.JobOutcome) is not None:
        return State.FINISHED, ""
    judged = _first(master, records.VerdictReached) is not None
    begun = [record.name for record in _all(master, records.RoundStarted)]
    stopped = _last(master, records.MasterStopped)
    # A living master has written again by then.
    by_s = max(entry.time_s for entry in master) + (_ACTING_S if judged else _SILENCE_S)
    silent = now_s is not None and now_s > by_s
    gone = superseded or bool(entries.supervisor) or silent or stopped is not None
    note = sentences.unfinished_text(stopped, gone=gone, judged=judged, rounds=begun)
    return State.STOPPED if gone else State.RUNNING, note


def _requeues(acts: Sequence[Act]) -> bool:
    """Return whether a check put its job back into the queue, by its journal."""
    return any(act.action == "requeue" and act.progress is not Progress.FAILED for act in acts)


# --- its nodes and rounds ------------------------------------------------------------------------


def _nodes(
    entries: RunEntries,
    start: records.RunStarted | None,
    verdict: records.VerdictReached | None,
    figures: Mapping[str, Mapping[str, tuple[float, ...]]],
) -> tuple[Node, ...]:
    judged = {of_node.node: of_node for of_node in (verdict.nodes if verdict else [])}
    nodes = []
    for name in dict.fromkeys([*(start.nodes if start else []), *judged]):
        of_node = judged.get(name)
        held = _last(entries.nodes.get(name, ()), records.NodeHeld)
        nodes.append(
            Node(
                node=name,
                run=entries.label,
                level=of_node.level if of_node else None,
                reason=of_node.reason if of_node else "",
                component=of_node.component if of_node else "",
                slowdown=of_node.slowdown if of_node else None,
                probability=of_node.probability if of_node else None,
                evidence=of_node.evidence if of_node else (),
                hardware=_hardware(entries.nodes.get(name, ())),
                held=held.text if held else "",
                figures={
                    sentences.figure_key(probe): tuple(float(f"{value:.6g}") for value in values)
                    for probe, values in figures.get(name, {}).items()
                },
                storage=tuple(_all(entries.nodes.get(name, ()), records.StorageTested)),
            )
        )
    return tuple(nodes)


def _hardware(entries: Sequence[Entry]) -> Hardware | None:
    """Return a node's parts, None if its workers were never ready."""
    ready = _last(entries, records.WorkersReady)
    if ready is None:
        return None
    burns = [burn for watched in _all(entries, records.DevicesWatched) for burn in watched.devices]
    devices = {burn.index: burn for burn in burns}
    return Hardware(
        model=ready.model,
        interface=ready.interface,
        devices=tuple(
            Device(
                index=index,
                uuid=burn.uuid,
                pci_address=burn.bus,
                notes=tuple(dict.fromkeys(w for b in burns if b.index == index for w in words(b))),
            )
            for index, burn in sorted(devices.items())
        ),
    )


def _rounds(
    entries: RunEntries, measured: Mapping[tuple[int, str], Mapping[str, float]]
) -> Iterator[Round]:
    """Yield the rounds in their order."""
    began: dict[int, tuple[float, records.RoundStarted]] = {}
    ended: dict[int, tuple[float, records.RoundEnded]] = {}
    aborted: dict[tuple[int, tuple[str, ...]], records.GroupAborted] = {}
    for entry in entries.master:
        match entry.record:
            case records.RoundStarted(round=number) as record:
                began[number] = entry.time_s, record
            case records.RoundEnded(round=number) as record:
                ended[number] = entry.time_s, record
            case records.GroupAborted(round=number, group=group) as record:
                aborted[number, tuple(group)] = record
    reports = {
        (report.round, report.node): report
        for node in entries.nodes.values()
        for report in _all(node, records.NodeReported)
    }
    start_s = min(_times(entries.master, records.RunStarted), default=None)
    for number, (time_s, record) in sorted(began.items()):
        end_s, end = ended.get(number, (None, None))
        silent = {*record.absent, *(end.silent if end else ())}
        yield Round(
            round=number,
            name=record.name,
            phase=record.phase,
            probes=tuple(probe.name for probe in record.probes),
            after_s=round(time_s - (time_s if start_s is None else start_s), 3),
            duration_s=round(end_s - time_s, 3) if end_s is not None else None,
            groups=tuple(
                _group(
                    tuple(group),
                    {n: reports[number, n] for n in group if (number, n) in reports},
                    aborted.get((number, tuple(group))),
                    silent,
                    measured.get((number, group[0] if group else ""), {}).get(ALLGATHER),
                )
                for group in record.groups
            ),
        )


def _group(
    nodes: tuple[str, ...],
    reports: Mapping[str, records.NodeReported],
    aborted: records.GroupAborted | None,
    silent: set[str],
    allgather_gb_per_s: float | None,
) -> Group:
    outcomes = {report.outcome for report in reports.values()}
    if aborted is not None and aborted.timed_out:
        outcomes.add(Outcome.TIMED_OUT)
    if silent & {*nodes}:
        outcomes.add(Outcome.NOT_RUN)
    details = [f"{node}: {report.detail}" for node, report in reports.items() if report.detail]
    took = [reports[node].elapsed_ms if node in reports else None for node in nodes]
    return Group(
        nodes=nodes,
        outcome=next((outcome for outcome in _WORST_FIRST if outcome in outcomes), None),
        elapsed_s=tuple(None if ms is None else round(ms / 1000, 4) for ms in took),
        details=(*details, *([aborted.reason] if aborted is not None else [])),
        silent=tuple(node for node in nodes if node in silent),
        allgather_gb_per_s=allgather_gb_per_s,
    )


# --- its script ----------------------------------------------------------------------------------


def _script_name(start: records.RunStarted | None) -> str:
    """Return the user's name for the script: the job's, if a program hid the file."""
    name = PurePath(start.script).name if start else ""
    return start.job_name if start and start.job_name and name.startswith(".") else name


def _script(
    entries: RunEntries, start: records.RunStarted | None, now_s: float | None
) -> Script | None:
    last = _last(entries.supervisor, ScriptStarted)
    runs = [e for e in entries.supervisor if isinstance(e.record, ScriptStarted | ScriptEnded)]
    if not runs:
        return None
    began_s = _times(entries.supervisor, ScriptStarted)
    since_s = began_s[-1] if began_s else None
    progress = [
        (e.time_s, e.record)
        for e in entries.monitor
        if isinstance(e.record, ProgressSeen) and (since_s is None or e.time_s >= since_s)
    ]
    latest_s, latest = progress[-1] if progress else (0.0, None)
    total = re.search(rf"(?<!\d){latest.step}\s?/\s?(\d+)", latest.line) if latest else None
    paced = [(at_s - record.age_s, record.step) for at_s, record in progress if record.step]
    first, newest = (paced[-_PACED:][0], paced[-1]) if paced else ((0.0, 0), (0.0, 0))
    steps = newest[1] - first[1]
    before = [e.record for e in entries.post_mortem if since_s is None or e.time_s < since_s]
    script = Script(
        name=_script_name(start) or PurePath(last.script if last else "").name,
        started_s=since_s,
        nodes=tuple(last.nodes) if last else (),
        restarts=last.restart if last else 0,
        restarted_after=tuple(record for record in before if isinstance(record, Diagnosed)),
        seen=latest,
        seen_s=latest_s,
        steps=int(total[1]) if total else 0,
        step_ms=round(1000 * (newest[0] - first[0]) / steps, 1) if steps > 0 else 0.0,
    )
    end = runs[-1].record
    if isinstance(end, ScriptEnded):
        script = replace(
            script, exit_code=end.exit_code, signal=end.signal, duration_s=end.duration_s
        )
    until_s = runs[-1].time_s if isinstance(end, ScriptEnded) else now_s
    seen_s = [e.time_s for e in entries.monitor if since_s and e.time_s >= since_s]
    if not (progress and since_s and until_s):
        return script
    blind = [(a, b) for a, b in pairwise([*seen_s, until_s]) if b - a > _BLIND_S]
    stretches = tuple((round(a - since_s, 1), round(b - since_s, 1)) for a, b in blind)
    return replace(script, unwatched=stretches)


# --- events --------------------------------------------------------------------------------------


def _timeline(
    entries: RunEntries, start: records.RunStarted | None, queued_s: float | None
) -> Iterator[Event]:
    """Yield the events, by the clocks of their writers; none without a start.

    The master, the supervisor and the requeue helper may run on different nodes, so events of two
    writers are only as well ordered as their nodes' clocks agree.
    """
    if start is None:
        return
    start_s = _times(entries.master, records.RunStarted)[0]
    if queued_s is not None:
        began_s = entries.master[0].time_s
        after_s = min(0.0, round((start.start_time_s or began_s) - began_s, 3))
        text = f"started by Slurm after {duration_text(queued_s)} in the queue"
        yield Event(after_s=after_s, event="job_started", text=text)
    name = _script_name(start) or "the script"
    for entry in entries.written:
        text = sentences.record_text(entry.record, name) if entry.record else ""
        if not text:
            continue
        action, nodes = "", getattr(entry.record, "nodes", [])
        match entry.record:
            case records.VerdictReached(nodes=judged):
                nodes = [node.node for node in judged if node.level is not Level.HEALTHY]
            case records.RunStarted() | script_records.Diagnosed():
                nodes = []
            case records.ActionIntended() | records.ActionDone() as record:
                action = record.action
            case records.JobOutcome(disposition=disposition):
                action = disposition
            case script_records.FailurePlanned(plan=plan):
                action = plan
            case _:
                pass
        yield Event(
            after_s=round(entry.time_s - start_s, 3),
            event=entry.kind,
            text=text,
            action=action,
            nodes=tuple(nodes),
            succeeded=getattr(entry.record, "succeeded", None),
        )


def _life(
    entries: RunEntries,
    start: records.RunStarted | None,
    queued_s: float | None,
    now_s: float | None,
) -> Iterator[Phase]:
    """Yield the parts of the job's life that this journal covers: queue, check, training, hangs."""
    if start is None:
        return
    began_s = entries.master[0].time_s
    started_s = min(began_s, float(start.start_time_s or began_s))
    if queued_s:
        yield Phase(phase="queue", begin_s=started_s - queued_s, end_s=started_s)
    finished = _times(entries.master, records.JobOutcome)
    check_s = finished[-1] if finished else entries.master[-1].time_s
    yield Phase(phase="check", begin_s=began_s, end_s=check_s)
    last_s = max(now_s or 0.0, entries.written[-1].time_s)
    runs = [e for e in entries.supervisor if isinstance(e.record, ScriptStarted | ScriptEnded)]
    ends_s = [*(entry.time_s for entry in runs[1:]), last_s]
    for entry, end_s in zip(runs, ends_s, strict=False):
        if isinstance(entry.record, ScriptStarted):
            yield Phase(phase="training", begin_s=entry.time_s, end_s=end_s)
    over_s = runs[-1].time_s if runs and isinstance(runs[-1].record, ScriptEnded) else last_s
    hang_s: float | None = None
    for entry in entries.monitor:
        match entry.record:
            case TrainingEvent(event=EventKind.HANG, stalled_s=stalled_s):
                hang_s = entry.time_s - stalled_s
            case TrainingEvent(event=EventKind.HANG_OVER) if hang_s is not None:
                yield Phase(phase="hang", begin_s=hang_s, end_s=entry.time_s)
                hang_s = None
            case _:
                pass
    if hang_s is not None:
        ends_s = [entry.time_s for entry in runs if entry.time_s > hang_s]
        yield Phase(phase="hang", begin_s=hang_s, end_s=min(ends_s, default=over_s))
