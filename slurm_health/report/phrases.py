# SPDX-License-Identifier: Apache-2.0
"""The short texts of a report: counts, times, what was done, how the script ended."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from slurm_health.preflight.decide import unchecked
from slurm_health.records.nodeset import fold
from slurm_health.records.text import counted, duration_text
from slurm_health.records.verdict import Level, LinkVerdict
from slurm_health.report.layout import NOTHING
from slurm_health.report.model import Act, JobReport, Progress, RunReport, ScriptOutcome, State
from slurm_health.system import journal
from slurm_health.system.signals import signal_name

WORST_FIRST = (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE, None, Level.HEALTHY)

MASTER_STOPPED = "the master stopped"  # where no record says what stopped it

_FOLDABLE = re.compile(r"[\w.-]+", re.ASCII)


class Verb(NamedTuple):
    """What an act is called: before it is done, done, and where it failed."""

    plain: str
    done: str
    failed: str


_VERBS = {
    "drain": Verb("drain", "drained", "did not drain"),
    "exclude": Verb("exclude", "excluded", "did not exclude"),
    "drop": Verb("give back", "gave back", "could not give back"),
    "requeue": Verb("requeue the job", "requeued", "did not requeue the job"),
    "hold": Verb("hold the job", "held the job", "did not hold the job"),
    "cancel": Verb("cancel the job", "cancelled the job", "did not cancel the job"),
    "end_script": Verb("end the script", "ended the script", "did not end the script"),
    "proceed": Verb("continue with", "continued with", "did not continue with"),
}
_ON_THE_JOB = {"requeue", "hold", "cancel", "end_script"}


def nodes_text(nodes: Iterable[str]) -> str:
    """Return a short node list; names that no node list can hold are listed as they are."""
    names = list(nodes)
    return fold(names) if all(map(_FOLDABLE.fullmatch, names)) else ", ".join(names)


def verb_of(action: str) -> Verb:
    """Return what an act is called; one that this version does not know, by its own name."""
    return _VERBS.get(action) or Verb(action, action, f"no {action}")


def act_text(words: str, action: str, nodes: Sequence[str]) -> str:
    """Return a verb with the nodes it is done to: `drained n3`, `held the job`."""
    return words if action in _ON_THE_JOB or not nodes else f"{words} {nodes_text(nodes)}"


def moment_text(time_s: float | None) -> str:
    """Return a time as the clock on the wall here shows it."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s)) if time_s else NOTHING
    except (OSError, OverflowError, ValueError):  # beyond all calendars
        return NOTHING


def attempt_text(run: RunReport) -> str:
    """Return which check this is: `attempt 0`, or `attempt 0, check 2` for a later one in it."""
    return _attempt_text(run.attempt, run.check)


def _attempt_text(attempt: int, check: int) -> str:
    return f"attempt {attempt}" + (f", check {check}" if check > 1 else "")


def effort_text(run: RunReport) -> str:
    """Return how long the check took: `3 rounds, 6.1 s`, empty before its first round."""
    if not run.rounds:
        return ""
    rounds = counted(run.rounds, "round")
    return rounds if run.duration_s is None else f"{rounds}, {duration_text(run.duration_s)}"


def found_text(run: RunReport, *, names: bool = False) -> str:
    """Return the verdicts in short: `all healthy`, `1 faulty`; with `names`, `1 faulty (n3)`."""
    if not run.judged:
        return run.note or _unjudged_text(run)
    parts = []
    for level in (Level.FAULTY, Level.SLOW, Level.INCONCLUSIVE):
        nodes = run.named(level)
        if nodes:
            who = f" ({nodes_text(nodes)})" if names else ""
            parts.append(f"{len(nodes)} {level.value}{who}")
    nodes_well = not parts
    parts += links_text(run.paths, run.leaves)
    return ", ".join(["all healthy", *parts] if nodes_well else parts)


def unfinished_text(stopped: str, *, judged: bool, rounds: Collection[int]) -> str:
    """Return how far a check got that has not ended: what stopped it, empty where it runs.

    `rounds` are those that have begun, by their numbers, as everywhere else.
    """
    if judged:
        return f"{f'{stopped} while' if stopped else 'still'} acting on the verdict"
    if not rounds:
        waiting = "still running: waiting for the agents"
        return f"{stopped} before the first round" if stopped else waiting
    where = f"round {max(rounds)}"
    return f"{stopped} before a verdict, in {where}" if stopped else f"still running: {where}"


def left_texts(report: JobReport) -> list[str]:
    """Return each bad node that a job has left behind: `without n3 (faulty)`."""
    here = {node.node for node in report.runs[-1].nodes}
    return [
        f"without {node.node} ({node.level.value})"
        for node in report.nodes
        if node.node not in here and node.level not in (Level.HEALTHY, None)
    ]


def links_text(paths: Iterable[LinkVerdict], leaves: Iterable[LinkVerdict]) -> list[str]:
    """Return each path and leaf switch that is not well: `path n1–n2 faulty`."""  # noqa: RUF002
    return [
        f"{kind} {NOTHING.join(link.ends)} {link.level.value}"
        for kind, links in (("path", paths), ("leaf", leaves))
        for link in links
    ]


def outcome_texts(run: RunReport) -> list[str]:
    """Return what the check led to: what was done to nodes and job, and the script's end."""
    done = _acts_text(run)
    parts = [done] if done else []
    if run.judged and run.state is not State.FINISHED:
        parts.append(run.note)
    if run.script:
        ended = run.superseded or bool(run.requeued)
        script = _script_text(run.script, superseded=ended, requeued=bool(run.requeued))
        # A check that requeues its job starts no script: what ran did so before.
        ran_before = any(a.action == "requeue" and a.progress is Progress.DONE for a in run.acts)
        parts = [script, *parts] if ran_before else [*parts, script]
    return [*parts, run.requeued] if run.requeued else parts


def _unjudged_text(run: RunReport) -> str:
    if run.unchecked:
        return unchecked.text(run.unchecked)
    adopted = run.started.settings.get("as_checked_in") if run.started else None
    if adopted:
        before = journal.attempt_and_check(str(adopted)) or (run.attempt, 1)
        return f"as in {_attempt_text(*before)}, not checked again"
    return f"no verdict: {run.reason}" if run.reason else "no verdict"


def _acts_text(run: RunReport) -> str:
    done: dict[str, list[str]] = {}
    for act in run.acts:
        if act.progress is Progress.DONE:
            done.setdefault(act.action, []).extend(act.nodes)
    texts = []
    for act in run.acts:
        if act.progress is Progress.DONE and act.action == "exclude" and "requeue" in done:
            continue  # the requeue says without whom
        text = _act_text(act, run)
        if act.progress is Progress.DONE and act.action == "requeue" and done.get("exclude"):
            text += f" without {_named_once(done['exclude'], done.get('drain', []))}"
        if text:
            texts.append(text)
    return ", ".join([*texts, *_disposition_texts(run)])


def _named_once(nodes: list[str], before: list[str]) -> str:
    if set(nodes) != set(before):
        return nodes_text(nodes)
    return "it" if len(set(nodes)) == 1 else "them"


def _act_text(act: Act, run: RunReport) -> str:
    if act.action == "proceed" and act.progress is not Progress.FAILED:
        return _proceed_text(run, act.nodes, act.reason)
    verb = verb_of(act.action)
    # The end of a hold is the end of the process that would record it.
    held = act.action == "hold" and run.disposition == "hold"
    if act.progress is Progress.DONE or (held and act.progress is Progress.INTENDED):
        why = f" ({act.reason})" if act.action == "hold" and act.reason else ""
        return act_text(verb.done, act.action, act.nodes) + why
    if act.progress is Progress.FAILED:
        why = act.detail or "cause not recorded"
        return f"{act_text(verb.failed, act.action, act.nodes)} ({why})"
    begun = act_text(f"began to {verb.plain}", act.action, act.nodes)
    return f"{begun}, result not recorded"


def _proceed_text(run: RunReport, nodes: tuple[str, ...], reason: str) -> str:
    """Return how the job went on; that a healthy one did goes without saying."""
    all_nodes = {node.node for node in run.nodes}
    unwell = [node for node in run.nodes if node.level is not Level.HEALTHY]
    why = f" ({reason})" if reason and unwell else ""
    if nodes and set(nodes) != all_nodes:
        return f"continued with {nodes_text(nodes)}{why}"
    return f"continued with all nodes{why}" if unwell else ""


def _disposition_texts(run: RunReport) -> list[str]:
    """Return what becomes of the job, as far as the acts have not said it."""
    acted = {act.action for act in run.acts}
    if run.disposition == "stop" and "hold" not in acted:
        return [f"stopped: {run.reason}" if run.reason and run.judged else "stopped"]
    if run.disposition == "proceed" and not acted & {"proceed", "drop", "requeue", "hold"}:
        text = _proceed_text(run, (), "")
        said = run.reason if text and run.judged else ""
        return [said or text] if text else []
    if run.disposition == "requeue" and not acted & {"requeue", "hold"}:
        return ["will be requeued"]
    return []


def _script_text(script: ScriptOutcome, *, superseded: bool, requeued: bool) -> str:
    name = script.name or "the script"
    if requeued and script.signal and script.duration_s is not None:
        return f"{name} ran {duration_text(script.duration_s)}"  # the signal is the requeue's
    if script.exit_code is None:
        return f"{name} started, end not recorded" + ("" if superseded else " yet")
    how = f"killed by {signal_name(script.signal)}" if script.signal else f"exit {script.exit_code}"
    span = "" if script.duration_s is None else f" ran {duration_text(script.duration_s)},"
    return f"{name}{span} {how}"
