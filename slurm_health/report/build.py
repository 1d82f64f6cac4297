# SPDX-License-Identifier: Apache-2.0
"""What one check did and found, from the entries of its journal alone. Pure: no file, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from slurm_health.preflight.session.measurement import figures_of
from slurm_health.records import records
from slurm_health.records.record_codec import Entry
from slurm_health.records.script_records import (
    REQUEUED,
    Attribution,
    Diagnosed,
    EventKind,
    ScriptStarted,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, LinkVerdict
from slurm_health.report.model import (
    Act,
    Event,
    JobReport,
    NodeReport,
    Progress,
    RunEntries,
    RunReport,
    ScriptOutcome,
    State,
    acts_of,
)
from slurm_health.report.phrases import MASTER_STOPPED, unfinished_text
from slurm_health.report.progress import script_end, so_far
from slurm_health.report.rounds import hardware_of, rounds_of
from slurm_health.report.timeline import timeline, written
from slurm_health.system import journal

# How long a master may be silent before it is taken for dead: one that waits says so every ten
# seconds, by its own clock; one that acts waits for Slurm.
_SILENCE_S = 120.0
_ACTING_S = 900.0
# Slurm tells whole seconds, and clocks of two machines differ by as much and more.
_CLOCK_S = 5.0

_OUTSIDE = Attribution.OUTSIDE.value

_R = TypeVar("_R", bound=records.Record)


def run_report(
    entries: RunEntries,
    *,
    now_s: float | None = None,
    superseded: bool = False,
    requeued: bool = False,
    ours: bool = False,
    queued_from_s: float | None = None,
) -> RunReport:
    """Return what one check did and found.

    Args:
        entries: what was read of it.
        now_s: the time, to tell a check that runs from one whose master died; without it an
            unfinished check is taken to run.
        superseded: a later check of the job exists, so this one is over.
        requeued: a later attempt of the job exists, so a requeue that was begun took effect.
        ours: a check of its attempt put the job back into the queue.
        queued_from_s: when its attempt was put into the queue, None for a further check in one.
    """
    attempt, check = journal.attempt_and_check(entries.label) or (0, 1)
    start = _first(entries.master, records.RunStarted)
    verdict = _last(entries.master, records.VerdictReached)
    finished = _last(entries.master, records.RunFinished)
    state, note = _state(entries, superseded=superseded, now_s=now_s)
    queued_s = _queued_s(entries.master, start, queued_from_s)
    acts = acts_of([*entries.master, *entries.requeue])
    post_mortem = _last(_since_start(entries.post_mortem, entries), Diagnosed)
    back = post_mortem is not None and post_mortem.cause == REQUEUED
    void = _void_rounds(entries.master)
    samples = _samples(entries, void)
    figures = figures_of(samples, verdict)
    return RunReport(
        label=entries.label,
        attempt=attempt,
        check=check,
        state=state,
        note=note,
        superseded=superseded,
        started=start,
        started_s=entries.master[0].time_s if entries.master else None,
        queued_s=queued_s,
        rounds=len(_rounds(entries.master) - void),
        duration_s=_duration_s(entries.master),
        judged=verdict is not None,
        nodes=_node_reports(entries, start, verdict, figures.by_node),
        measured=figures.by_round,
        paths=tuple(verdict.paths) if verdict else (),
        leaves=tuple(verdict.leaves) if verdict else (),
        floors=verdict.floors if verdict else {},
        unseen=verdict.unseen if verdict else "",
        acts=tuple(map(_took_effect, acts)) if requeued else acts,
        disposition=finished.disposition if finished else "",
        reason=finished.reason if finished else "",
        unchecked=_last(entries.master, records.Unchecked),
        exit_code=finished.exit_code if finished else None,
        script=_script(entries, start),
        post_mortem=None if back else post_mortem,
        events=tuple(_events(entries)),
        timeline=(*_start_events(entries, start, queued_s), *timeline(entries)),
        samples=samples,
        missing=entries.missing,
        so_far="" if superseded or now_s is None else so_far(entries, now_s),
        requeued="" if ours or _requeues(acts) else _requeued(post_mortem, later=requeued),
        each_round=rounds_of(entries.master, entries.nodes, void=frozenset(void)),
    )


def _requeued(post_mortem: Diagnosed | None, *, later: bool) -> str:
    """Return how others put the job back into the queue, empty where they did not."""
    if post_mortem and post_mortem.cause == REQUEUED:
        return post_mortem.description.removeprefix("the job was ")
    if not later:
        return ""
    why = post_mortem.description if post_mortem and post_mortem.attribution == _OUTSIDE else ""
    return f"requeued ({why})" if why else "requeued by Slurm or by a person"


def _queued_s(
    master: Sequence[Entry], start: records.RunStarted | None, queued_from_s: float | None
) -> float | None:
    """Return how long an attempt waited in the queue, None where clocks disagree on it.

    Until Slurm started it or, where Slurm did not tell (before 23.02), until its check began.
    """
    if start is None or queued_from_s is None:
        return None
    waited_s = (start.start_time_s or master[0].time_s) - queued_from_s
    return round(max(0.0, waited_s), 1) if waited_s > -_CLOCK_S else None


def _start_events(
    entries: RunEntries, start: records.RunStarted | None, queued_s: float | None
) -> list[Event]:
    """Return the start of an attempt by Slurm, before the check began."""
    if start is None or queued_s is None:
        return []
    began_s = entries.master[0].time_s
    after_s = round((start.start_time_s or began_s) - began_s, 3)
    return [Event(after_s=min(0.0, after_s), what="job_started", detail=f"{queued_s}")]


def _since_start(of_script: Sequence[Entry], entries: RunEntries) -> Sequence[Entry]:
    """Return what was written since the script was started last: on one node, by one clock."""
    starts = [e.time_s for e in entries.supervisor if isinstance(e.record, ScriptStarted)]
    return [entry for entry in of_script if entry.time_s >= starts[-1]] if starts else of_script


def _events(entries: RunEntries) -> list[TrainingEvent]:
    """Return what was seen of the training; hangs of its last start only."""
    hangs = (EventKind.HANG, EventKind.HANG_OVER)
    since = _all(_since_start(entries.monitor, entries), TrainingEvent)
    before = [e for e in _all(entries.monitor, TrainingEvent) if e not in since]
    return [*(event for event in before if event.event not in hangs), *since]


def _all(entries: Sequence[Entry], kind: type[_R]) -> list[_R]:
    return [entry.record for entry in entries if isinstance(entry.record, kind)]


def _first(entries: Sequence[Entry], kind: type[_R]) -> _R | None:
    return next(iter(_all(entries, kind)), None)


def _last(entries: Sequence[Entry], kind: type[_R]) -> _R | None:
    return next(reversed(_all(entries, kind)), None)


def _rounds(master: Sequence[Entry]) -> set[int]:
    return {record.round for record in _all(master, records.RoundStarted)}


def _void_rounds(master: Sequence[Entry]) -> set[int]:
    """Return the rounds that a master's end cut short and that were not begun again."""
    void: set[int] = set()
    for entry in master:
        if isinstance(entry.record, records.RoundStarted):
            void.discard(entry.record.round)
        elif isinstance(entry.record, records.RoundEnded) and entry.record.void:
            void.add(entry.record.round)
    return void


def _samples(entries: RunEntries, void: set[int]) -> tuple[records.Sampled, ...]:
    """Return what was measured, but for void rounds."""
    return tuple(
        sample
        for node in entries.nodes.values()
        for sample in _all(node, records.Sampled)
        if sample.round not in void
    )


def _duration_s(master: Sequence[Entry]) -> float | None:
    """Return the time to the verdict; none where there is no verdict or the clock went back."""
    ends = [entry.time_s for entry in master if isinstance(entry.record, records.VerdictReached)]
    if not ends or ends[-1] < master[0].time_s:
        return None
    return round(ends[-1] - master[0].time_s, 4)  # as precise as the journal's clock


def _node_reports(
    entries: RunEntries,
    start: records.RunStarted | None,
    verdict: records.VerdictReached | None,
    figures: Mapping[str, Mapping[str, tuple[float, ...]]],
) -> tuple[NodeReport, ...]:
    judged = {of_node.node: of_node for of_node in (verdict.nodes if verdict else [])}
    names = dict.fromkeys([*(start.nodes if start else []), *judged])
    return tuple(
        NodeReport(
            node=node,
            label=entries.label,
            verdict=judged.get(node),
            figures=figures.get(node, {}),
            hardware=hardware_of(entries.nodes.get(node, ())),
        )
        for node in names
    )


def _took_effect(act: Act) -> Act:
    begun = act.action == "requeue" and act.progress is Progress.INTENDED
    return replace(act, progress=Progress.DONE) if begun else act


def _script(entries: RunEntries, start: records.RunStarted | None) -> ScriptOutcome | None:
    began = _last(entries.supervisor, ScriptStarted)
    ended = script_end(entries.supervisor)
    if began is None and ended is None:
        return None
    name = _script_name(start) or PurePath(began.script if began else "").name
    if ended is None:
        return ScriptOutcome(name=name)
    return ScriptOutcome(
        name=name,
        exit_code=ended.exit_code,
        signal=ended.signal,
        duration_s=ended.duration_s,
    )


def _script_name(start: records.RunStarted | None) -> str:
    """Return what the user calls the script: the job's name, where a program hid the file."""
    name = PurePath(start.script).name if start else ""
    return start.job_name if start and start.job_name and name.startswith(".") else name


def _state(entries: RunEntries, *, superseded: bool, now_s: float | None) -> tuple[State, str]:
    if _first(entries.master, records.RunStarted) is None:
        return State.NOT_STARTED, "no start of a check is recorded"
    if _first(entries.master, records.RunFinished) is not None:
        return State.FINISHED, ""
    script_began = any(entry.record for entry in entries.supervisor)
    silent = now_s is not None and now_s > _expected_by_s(entries.master)
    ended = _ended_by(entries.master)
    gone = superseded or script_began or silent or ended is not None
    note = unfinished_text(
        (_words_of(ended) if ended else MASTER_STOPPED) if gone else "",
        judged=_first(entries.master, records.VerdictReached) is not None,
        rounds=_rounds(entries.master),
    )
    return State.STOPPED if gone else State.RUNNING, note


def _words_of(ended: records.MasterStopped) -> str:
    by_hand = "interrupted (Ctrl-C, SIGINT)" if ended.reason == "SIGINT" else ""
    return ended.job or by_hand or f"stopped by {ended.reason}"


def _ended_by(master: Sequence[Entry]) -> records.MasterStopped | None:
    """Return what ended the last master, None where nothing is known to have."""
    kinds = records.MasterStopped | records.MasterResumed
    ends = [e.record for e in master if isinstance(e.record, kinds)]
    return ends[-1] if ends and isinstance(ends[-1], records.MasterStopped) else None


def _expected_by_s(master: Sequence[Entry]) -> float:
    """Return when a living master has written again at the latest."""
    acting = _first(master, records.VerdictReached) is not None
    return max(entry.time_s for entry in master) + (_ACTING_S if acting else _SILENCE_S)


def job_report(runs: Sequence[RunEntries], *, now_s: float | None = None) -> JobReport:
    """Return what all checks of one job did and found.

    Args:
        runs: at least one, oldest first.
        now_s: see `run_report`.
    """
    places = [journal.attempt_and_check(run.label) or (0, 1) for run in runs]
    attempts = [attempt for attempt, _ in places]
    # What a check puts back into the queue may be the script that an earlier one let start.
    ours = {
        attempt
        for run, attempt in zip(runs, attempts, strict=True)
        if _requeues(acts_of([*run.master, *run.requeue]))
    }
    reports = tuple(
        run_report(
            run,
            now_s=now_s,
            superseded=index + 1 < len(runs),
            requeued=max(attempts) > attempts[index],
            ours=attempts[index] in ours,
            queued_from_s=_queued_from_s(runs, attempts, index),
        )
        for index, run in enumerate(runs)
    )
    known = [report.started for report in reports if report.started]
    start = known[-1] if known else None
    return JobReport(
        # Where it lies is as Slurm said; what its records say of that is their owner's word.
        job=runs[-1].task or journal.job_of(runs[0].job),
        cluster=runs[0].cluster,
        partition=start.partition if start else "",
        script=next((report.script.name for report in reversed(reports) if report.script), "")
        or _script_name(start),
        runs=reports,
        nodes=_decisive(reports),
        paths=_standing_paths(reports),
        leaves=tuple({leaf.ends: leaf for run in reports for leaf in run.leaves}.values()),
    )


def _requeues(acts: Sequence[Act]) -> bool:
    """Tell whether a check put its job back into the queue, as far as it is known to."""
    return any(act.action == "requeue" and act.progress is not Progress.FAILED for act in acts)


def _queued_from_s(runs: Sequence[RunEntries], attempts: Sequence[int], index: int) -> float | None:
    """Return when the attempt was put into the queue that this run is the first check of."""
    if index == 0:
        start = _first(runs[0].master, records.RunStarted)
        first = start is not None and attempts[0] == 0 and start.submit_time_s is not None
        return start.submit_time_s if start and first else None
    if attempts[index] != attempts[index - 1] + 1:
        return None
    return max((entry.time_s for entry in written(runs[index - 1])), default=None)


def _decisive(runs: Sequence[RunReport]) -> tuple[NodeReport, ...]:
    chosen: dict[str, NodeReport] = {}
    for run in runs:
        for node in run.nodes:
            if _replaces(node, chosen.get(node.node)):
                chosen[node.node] = node
    return tuple(chosen.values())


def _replaces(later: NodeReport, earlier: NodeReport | None) -> bool:
    """Tell whether a later word on a node stands for it.

    A node that was well may be lost since. What was found at fault is not cleared by a check that
    could not decide.
    """
    if earlier is None or earlier.level is None:
        return True
    undecided = later.level is Level.INCONCLUSIVE and earlier.level in (Level.FAULTY, Level.SLOW)
    return later.level is not None and not undecided


def _standing_paths(runs: Sequence[RunReport]) -> tuple[LinkVerdict, ...]:
    """Return the bad paths that no later verdict on both of their ends has cleared."""
    standing: dict[frozenset[str], LinkVerdict] = {}
    for run in runs:
        if run.judged:
            judged = {node.node for node in run.nodes if node.verdict}
            standing = {ends: path for ends, path in standing.items() if not ends <= judged}
        standing |= {frozenset(path.ends): path for path in run.paths}
    return tuple(standing.values())
