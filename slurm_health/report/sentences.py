# SPDX-License-Identifier: Apache-2.0
"""The sentences about a job, the same in its output, in the report's text, HTML and JSON.

They are made here from decoded facts, and no code parses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slurm_health.preflight.decide import unchecked
from slurm_health.records import records, script_records
from slurm_health.records.probe_catalog import unit_of
from slurm_health.records.script_records import (
    REQUEUED,
    Attribution,
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.records.text import (
    NOTHING,
    counted,
    cut,
    duration_text,
    elapsed_text,
    listed,
    one_line,
    ranks_text,
    signal_text,
)
from slurm_health.records.verdict import Level, LinkVerdict, Outcome, Severity, StorageVerdict
from slurm_health.report.story import Round, Run, Script

_EVIDENCE_CHARACTERS = 240
_NODES_CHARACTERS = 60
_NODE_LINES = 6  # of what nodes report of themselves
_RANKS = 3  # that are named; more are counted
SEVERITIES = {
    Level.FAULTY: Severity.ERROR,
    Level.SLOW: Severity.WARNING,
    Level.INCONCLUSIVE: Severity.UNDECIDED,
    Level.HEALTHY: Severity.OK,
    None: Severity.INFO,
}


# --- words for parts -----------------------------------------------------------------------------


def figure_key(probe: str) -> str:
    """Return a figure's name with its unit: `allgather_gb_per_s`."""
    unit = unit_of(probe).lower().replace("/", "_per_")
    return f"{probe.replace(' ', '_')}_{unit}"


def attempt_text(attempt: int, check: int) -> str:
    """Return `attempt 1`, or `attempt 1, check 2` for a later check in it; people count from 1."""
    return f"attempt {attempt + 1}" + (f", check {check}" if check > 1 else "")


def nodes_text(nodes: Sequence[str]) -> str:
    """Return a list of nodes; of a long one, their number and the first of them."""
    text = listed(nodes)
    if len(text) <= _NODES_CHARACTERS:
        return text
    return f"{len(nodes)} nodes ({', '.join(nodes[:2])}, ...)"


def times_text(count: int) -> str:
    """Return `once`, `twice`, or `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def links_text(paths: Iterable[LinkVerdict], leaves: Iterable[LinkVerdict]) -> list[str]:
    """Return paths and leaf switches that are not well: `path n1–n2 faulty`."""  # noqa: RUF002
    kinds = (("path", paths), ("leaf", leaves))
    return [f"{k} {NOTHING.join(link.ends)} {link.level.value}" for k, ls in kinds for link in ls]


def levels_text(run: Run) -> str:
    """Return the verdicts of a check: `all healthy`, `n3 faulty, n[5-6] slow`."""
    if run.unchecked and not run.judged:
        return unchecked.text(run.unchecked)
    if not run.judged:
        return run.note or (f"no verdict: {run.reason}" if run.reason else "no verdict")
    nodes = [(node.node, node.level) for node in run.nodes]
    return _verdict_text(nodes, links_text(run.paths, run.leaves), run.storage)


def _verdict_text(
    nodes: Sequence[tuple[str, Level | None]], links: list[str], storage: Iterable[StorageVerdict]
) -> str:
    bad = [
        f"{nodes_text(names)} {word}"
        for level, word in WORDS.items()
        if (names := [name for name, its in nodes if its is level])
    ]
    mounts = [f"storage {path.path} not well ({path.blame.value})" for path in storage]
    well = "all nodes healthy" if links or mounts else "all healthy"
    return ", ".join([*(bad or [well]), *links, *mounts])


WORDS = {Level.FAULTY: "faulty", Level.SLOW: "slow", Level.INCONCLUSIVE: "undecided"}


def effort_text(run: Run) -> str:
    """Return how long the check took: `2 rounds, 6.1 s`, empty before its first round.

    The test of every node alone is no round.
    """
    rounds = sum(any(len(group.nodes) > 1 for group in one.groups) for one in run.rounds)
    took = "" if run.duration_s is None else duration_text(run.duration_s)
    parts = (counted(rounds, "round") if rounds else "", took) if run.rounds else ()
    return ", ".join(filter(None, parts))


def unfinished_text(
    stopped: records.MasterStopped | None, *, gone: bool, judged: bool, rounds: Sequence[str]
) -> str:
    """Return how far an unfinished check got; `gone`: it no longer runs.

    `rounds` are the names of those that have begun.
    """
    by = "the master stopped"  # of unknown cause
    if stopped is not None:
        by_hand = "interrupted (Ctrl-C, SIGINT)" if stopped.reason == "SIGINT" else ""
        by = stopped.job or by_hand or f"stopped by {stopped.reason}"
    if judged:
        return f"{by} while acting on the verdict" if gone else "still acting on the verdict"
    if not rounds:
        return f"{by} before the first round" if gone else "still running: waiting for the agents"
    where = rounds[-1]
    return f"{by} before a verdict, in {where}" if gone else f"still running: {where}"


# --- the script: events and causes ---------------------------------------------------------------


def event_text(event: TrainingEvent) -> str:
    """Return an event of the training in one sentence, without its cause."""
    stalled = duration_text(event.stalled_s)
    match event.event:
        case EventKind.HANG if event.at_rest:
            return f"all ranks have only waited for {stalled}"
        case EventKind.HANG if event.line:
            return (
                f"no line that counts steps for {stalled}, the last was {event.line!r}, and no"
                " process of the job works"
            )
        case EventKind.HANG:
            return f"no step for {stalled} after step {event.step}"
        case EventKind.HANG_OVER:
            at = f", at step {event.step}" if event.step else ""
            return f"the training goes on after {stalled}{at}"
        case EventKind.STRAGGLER:
            return (
                f"{ranks_text(event.ranks)} on {listed(event.nodes)} is slower than the others:"
                f" {event.took_ms:.0f} ms of its own per step, {event.usual_ms:.0f} ms usual"
            )
        case EventKind.SLOWDOWN:
            return f"a step takes {event.took_ms:.0f} ms instead of {event.usual_ms:.0f} ms"
        case EventKind.UNEVEN:
            return f"the heaviest share of the work takes {event.ratio:.2f} times as long as others"
        case EventKind.LOSS:
            return f"the loss is NaN or infinite: {event.line!r}"


def event_line(event: TrainingEvent) -> str:
    """Return an event for the job's output: `no step for 33 s ...; the training hangs`."""
    if event.event is not EventKind.HANG:
        return event_text(event)
    return f"{event_text(event)}; the training {'seems to hang' if event.line else 'hangs'}"


def ends_for_hang(mode: str) -> str:
    """Return why a hanging script or job is ended, as its user has chosen."""
    return f"it hangs (--monitor={mode})"


def hung_text(description: str, when: str = "") -> str:
    """Return that a training hung, and where: `the training hung until it was cancelled: ...`."""
    return f"the training hung{f' {when}' if when else ''}: {description}"


def cause_text(cause: Diagnosed) -> str:
    """Return the cause in one sentence: the exception, if there is one, with its rank and place.

    `ValueError: bad label 17 in batch (rank 1 on n1, ddp.py:28)`.
    """
    if not cause.error:
        return cause.description
    many = len(cause.ranks) > _RANKS
    ranks = f"{len(cause.ranks)} ranks" if many else ranks_text(cause.ranks) if cause.ranks else ""
    who = " on ".join(filter(None, (ranks, listed(cause.nodes))))
    where = ", ".join(filter(None, (who, cause.place)))
    error = cut(one_line(cause.error), _EVIDENCE_CHARACTERS)
    return f"{error} ({where})" if where else error


def whose_text(cause: Diagnosed) -> str:
    """Return the blame, and how sure the cause is: a sure cause may leave the blame undecided."""
    if cause.attribution == Attribution.UNDECIDED:
        return f"{cause.sureness}; whose fault is undecided"
    return f"{cause.attribution}, {cause.sureness}"


def lines_of(cause: Diagnosed, *, verbose: bool = False) -> list[tuple[str, str]]:
    """Return titles and sentences, what a reader needs first in front.

    `verbose`: also what could not be collected, and all that nodes report of themselves.
    """
    lines = [("first", cause.first)] if cause.first else []
    lines.append(("cause", f"{cause.description} ({whose_text(cause)})"))
    lines += [("evidence", cut(line, _EVIDENCE_CHARACTERS)) for line in cause.evidence]
    most = len(cause.told) if verbose else _NODE_LINES
    lines += [("nodes", cut(line, _EVIDENCE_CHARACTERS)) for line in cause.told[:most]]
    if cause.told[most:]:
        lines.append(("nodes", f"{len(cause.told) - most} more lines: --verbose shows all"))
    if cause.accused:
        lines.append(("at fault", ", ".join(cause.accused)))
    if cause.advice:
        lines.append(("advice", cause.advice))
    if cause.sureness != "certain" or verbose:
        lines += [("failed", cut(text, _EVIDENCE_CHARACTERS)) for text in cause.failed]
    if verbose:
        lines += [("no data", text) for text in cause.not_collected]
    return [(title, one_line(text)) for title, text in lines]


# --- what happened -------------------------------------------------------------------------------


class _Verb(NamedTuple):
    """The verb of an act: planned, done, and failed."""

    plain: str
    done: str
    failed: str


_VERBS = {
    "drain": _Verb("drain", "drained", "did not drain"),
    "exclude": _Verb("exclude", "excluded", "did not exclude"),
    "drop": _Verb("give back", "gave back", "could not give back"),
    "requeue": _Verb("requeue the job", "requeued", "did not requeue the job"),
    "cancel": _Verb("cancel the job", "cancelled the job", "did not cancel the job"),
    "end_script": _Verb("end the script", "ended the script", "did not end the script"),
    "proceed": _Verb("continue with", "continued with", "did not continue with"),
}
_ON_THE_JOB = {"requeue", "cancel", "end_script"}
_DISPOSITIONS = {
    "proceed": "the job continues",
    "requeue": "the job will be requeued",
    "stop": "the job ends",
}
_PLANS = {
    "stop": "the script is not started again",
    "restart": "the script is to be started again",
    "check": "nodes are to be checked before the script is started again",
    "leave": "the job is to leave nodes behind",
}


def act_text(form: str, action: str, nodes: Sequence[str]) -> str:
    """Return a verb with the nodes it is done to: `drained n3`, `requeued`."""
    verb = _VERBS.get(action) or _Verb(action, action, f"no {action}")
    words = {"plain": verb.plain, "done": verb.done, "failed": verb.failed}[form]
    return words if action in _ON_THE_JOB or not nodes else f"{words} {nodes_text(nodes)}"


def record_text(record: records.Record, script: str) -> str:
    """Return a record as an event in words, empty if it is of no interest in a list of events."""
    match record:
        case records.RunStarted(nodes=nodes):
            return f"began to check {nodes_text(nodes)}"
        case records.MasterStopped(reason=reason, job=job):
            return f"the check was stopped by {reason}{f': {job}' if job else ''}"
        case records.VerdictReached(nodes=nodes, paths=paths, leaves=leaves, storage=storage):
            levels = [(node.node, node.level) for node in nodes]
            return f"verdict: {_verdict_text(levels, links_text(paths, leaves), storage)}"
        case records.ActionIntended(action=action, nodes=nodes):
            return f"going to {act_text('plain', action, nodes)}"
        case records.ActionDone(action=action, nodes=nodes, succeeded=well, detail=detail):
            text = act_text("done" if well else "failed", action, nodes)
            return f"{text} ({detail})" if detail else text
        case records.JobOutcome(disposition=disposition, nodes=nodes):
            on = f" with {listed(nodes)}" if nodes else ""
            return f"{_DISPOSITIONS.get(disposition, disposition)}{on}"
        case script_records.ScriptStarted(restart=restart, nodes=nodes):
            on = f" on {listed(nodes)}" if restart and nodes else ""
            return f"{script} started{' again' if restart else ''}{on}"
        case script_records.ScriptEnded(exit_code=code, signal=number):
            return f"{script} {_end_text(code, number)}"
        case script_records.FailurePlanned(plan=plan, reason=reason):
            return f"{_PLANS.get(plan, plan)}: {reason}"
        case Diagnosed(cause=cause, description=description):
            return description if cause == REQUEUED else f"post-mortem: {cause_text(record)}"
        case TrainingEvent(diagnosed=cause):
            return f"monitor: {event_text(record)}{f': {cause.description}' if cause else ''}"
        case _:
            return ""


def script_text(script: Script) -> str:
    """Return how a script ended, and after how long: `train.sh exited with code 3 after 41 s`."""
    name = script.name or "the script"
    if script.exit_code is None:
        return f"{name} started, end not recorded"
    took = f" after {duration_text(script.duration_s)}" if script.duration_s else ""
    return f"{name} {_end_text(script.exit_code, script.signal)}{took}"


def _end_text(exit_code: int, number: int) -> str:
    if number:
        return f"was killed by {signal_text(number)}"
    return f"exited with code {exit_code}" if exit_code else "finished"


_OUTCOMES = {
    Outcome.MEASURED: "measured",
    Outcome.FAILED: "failed",
    Outcome.TIMED_OUT: "timed out",
    Outcome.NOT_RUN: "not run",
    None: "no report yet",
}


def round_text(measured: Round) -> str:
    """Return a round: its groups, their outcomes, and the time of each node.

    `n3+n4 timed out (no answer from n4)`.
    """
    texts = []
    elapsed_s: dict[str, float] = {}
    for group in measured.groups:
        silent = f" (no answer from {listed(group.silent)})" if group.silent else ""
        texts.append(f"{'+'.join(group.nodes)} {_OUTCOMES[group.outcome]}{silent}")
        took = zip(group.nodes, group.elapsed_s, strict=True)
        elapsed_s |= {node: seconds for node, seconds in took if seconds is not None}
    texts += [elapsed_text(elapsed_s)] if elapsed_s else []
    took_s = "" if measured.duration_s is None else f", {measured.duration_s:.1f} s"
    return f"{measured.name}{took_s}: {'; '.join(texts)}"
