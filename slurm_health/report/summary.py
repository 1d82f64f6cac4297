# SPDX-License-Identifier: Apache-2.0
"""What a person who was not there needs first: what was found, what was done, what to do next."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slurm_health.records.nodeset import expand
from slurm_health.records.script_records import (
    SCRIPT_FAILED,
    Attribution,
    Diagnosed,
    EventKind,
    TrainingEvent,
    advice_afterwards,
)
from slurm_health.records.text import cut, duration_text, ranks_text
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.layout import NOTHING
from slurm_health.report.model import JobReport, NodeReport, Progress, RunReport, State
from slurm_health.report.no_exchange import likelier, no_exchange
from slurm_health.report.phrases import WORST_FIRST, found_text, nodes_text, outcome_texts
from slurm_health.report.sentences import event_text, whose_text

_BY_NAME = re.compile(r"asks for (\S+) by name \(--nodelist\)")  # as the decision says it
_ROWS = 3  # of what was found with the nodes: the rest is only named
_REASON = 160  # characters of one reason: the table below has all of it
_NO_PART = "node"
_FROM_OUTSIDE = Attribution.OUTSIDE.value
_ALMOST_CERTAIN = 0.99
_BY_CAUSE = (EventKind.UNEVEN, EventKind.LOSS)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was found, a sentence each, what was done, and what to do next; empty where nothing."""

    found: tuple[str, ...]
    done: str
    next: str

    def rows(self) -> list[tuple[str, str]]:
        """Return titles and sentences, in the order in which they are read."""
        rows = [("found" if not number else "", text) for number, text in enumerate(self.found)]
        rows += [("done", self.done)] if self.done else []
        return [*rows, *([("next", self.next)] if self.next else [])]


def summary_of(report: JobReport, *, followed: bool = False) -> Summary:
    """Return a job's report in a few sentences; `followed`: the reader sees it go on."""
    return Summary(
        found=tuple(_found(report)),
        done=_done(report),
        next=_next(report, followed=followed),
    )


def _latest(report: JobReport) -> RunReport:
    """Return the last check with what became of the script of its attempt.

    A script that is started again, or that runs a check itself, is told of in the journal of the
    check that it was started after.
    """
    last = report.runs[-1]
    here = [run for run in report.runs if run.attempt == last.attempt]
    its = next((run for run in reversed(here) if _has_script(run)), last)
    return replace(
        last,
        script=its.script,
        post_mortem=its.post_mortem,
        events=its.events,
        requeued=its.requeued,
    )


def _has_script(run: RunReport) -> bool:
    return bool(run.script or run.post_mortem or run.events)


def _found(report: JobReport) -> Iterator[str]:
    last = _latest(report)
    outside = last.post_mortem is not None and last.post_mortem.attribution == _FROM_OUTSIDE
    if not outside or last.hang:
        yield from _of_script(last)
    yield from _slow(last)
    apart = no_exchange(last)
    if apart:
        yield apart.found
    else:
        pairs = likelier(report)
        yield from _of_nodes([node for node in report.nodes if node.node not in pairs])
        yield from (f"{node} {why}" for node, why in pairs.items())
    for kind, links in (("path", report.paths), ("leaf", report.leaves)):
        for link in links[:_ROWS]:
            name = f"{kind} {NOTHING.join(link.ends)} {link.level.value}"
            yield f"{name} ({_sure(link.probability)}): {cut(link.reason, _REASON)}"
    unwell = any(_is_unwell(node) for node in report.nodes)
    if not last.judged or not (unwell or report.paths or report.leaves):
        who = nodes_text(node.node for node in last.nodes)
        told = f"{who}: {found_text(last)}" if who else found_text(last)
        seen = last.post_mortem or last.events
        yield f"before the script started, {told}" if seen else told
    if any(run.missing and not run.unchecked for run in report.runs):
        yield "parts of the journal are missing or cannot be read: see below"
    if last.post_mortem and outside and not last.hang:
        yield f"the script did not end by itself: {last.post_mortem.description}"


def why_in_short(report: JobReport) -> list[str]:
    """Return why the script failed, or that it hangs, for a list; nothing where it is well."""
    last = _latest(report)
    if last.post_mortem and last.post_mortem.cause != SCRIPT_FAILED:
        return [f"{last.post_mortem.description} ({whose_text(last.post_mortem)})"]
    if last.hang:
        return [f"{'hangs' if _still_runs(last) else 'hung'}: {last.hang.description}"]
    return []


def _of_script(run: RunReport) -> Iterator[str]:
    """Return why the script failed, or what was seen while it ran."""
    if run.post_mortem and run.post_mortem.attribution != _FROM_OUTSIDE:
        yield f"the script failed: {_diagnosis(run.post_mortem)}"
        return
    hangs = [event for event in run.events if event.event is EventKind.HANG]
    overs = [event for event in run.events if event.event is EventKind.HANG_OVER]
    for hang in hangs[-1:]:
        over = "" if run.hang else f"; it went on after {duration_text(overs[-1].stalled_s)}"
        hung = "hung for a while" if over else "hangs" if _still_runs(run) else "hung"
        end = f"; then {run.post_mortem.description}" if run.post_mortem else ""
        why = f": {_diagnosis(hang.diagnosed)}" if hang.diagnosed else ""
        yield f"the script {hung} ({event_text(hang)}){why}{over}{end}"


def _slow(run: RunReport) -> Iterator[str]:
    """Return what was slow or not a number while the script ran, the latest of a kind."""
    for event in _latest_of_kind(run):
        why = f": {_diagnosis(event.diagnosed)}" if event.diagnosed else ""
        yield f"while the script ran, {event_text(event)}{why}"


def _latest_of_kind(run: RunReport) -> list[TrainingEvent]:
    """Return the last of the events of a kind and cause, hangs aside."""
    kinds = {
        (
            event.event,
            event.diagnosed.cause if event.event in _BY_CAUSE and event.diagnosed else "",
        ): event
        for event in run.events
        if event.event not in (EventKind.HANG, EventKind.HANG_OVER)
    }
    return list(kinds.values())


def _diagnosis(found: Diagnosed) -> str:
    named = all(re.search(rf"\b{re.escape(node)}\b", found.description) for node in found.nodes)
    where = "" if named else f" on {nodes_text(found.nodes)}"
    ranks = ranks_text(found.ranks) if found.ranks else ""
    tell = 0 < len(found.ranks) <= _ROWS and ranks not in found.description
    whom = f", {ranks}" if tell else ""
    return f"{found.description}{where}{whom} ({whose_text(found)})"


def _of_nodes(nodes: Sequence[NodeReport]) -> Iterator[str]:
    """Return the nodes that are not well, worst first; those that say the same share a sentence."""
    same: dict[str, list[str]] = {}
    for level in WORST_FIRST:
        for node in nodes:
            if node.verdict and node.level is level and _is_unwell(node):
                same.setdefault(_said(node.verdict), []).append(node.node)
    rows = [f"{nodes_text(names)} {said}" for said, names in same.items()]
    yield from rows[:_ROWS]
    rest = [name for names in list(same.values())[_ROWS:] for name in names]
    if rest:
        yield f"and {nodes_text(rest)}: see below"


def _is_unwell(node: NodeReport) -> bool:
    return node.level not in (Level.HEALTHY, None)


def _said(verdict: NodeVerdict) -> str:
    reason = cut(verdict.reason, _REASON)
    if verdict.level is Level.INCONCLUSIVE:
        return f"could not be decided: {reason.removeprefix('could not be measured: ')}"
    part = verdict.component if verdict.component != _NO_PART else ""
    known = ", ".join(text for text in (part, _sure(verdict.probability)) if text)
    return f"{verdict.level.value} ({known}): {reason}"


def _sure(probability: float) -> str:
    if probability >= _ALMOST_CERTAIN:
        return "over 99 % sure"
    return f"{100 * probability:.0f} % sure"


def _done(report: JobReport) -> str:
    """Return what became of the job: which nodes it left, then what its last check led to."""
    last = report.runs[-1]
    left = [run for run in report.runs if run.attempt < last.attempt]
    onto = f" onto {nodes_text(_going_on(last))}" if last.nodes else ""
    moved = f"{_moves(left)}{onto}" if left else ""
    here = [run for run in report.runs if run.attempt == last.attempt]
    after = ", ".join(dict.fromkeys(text for run in reversed(here) for text in _outcome(run)))
    by = f"cancelled by {report.cancelled_by}" if report.cancelled_by else ""
    if report.ended:
        after = after.removesuffix(" yet")
    texts = (moved, _starts(here), after, report.ended, by, report.waits)
    return "; ".join(text for text in texts if text)


def _outcome(run: RunReport) -> list[str]:
    return [_without_reasons(text, run) for text in outcome_texts(run)]


def _starts(checks: Sequence[RunReport]) -> str:
    """Return how often the script was started again in an attempt, and where last."""
    events = [event for run in checks for event in run.timeline]
    again = [event for event in events if event.what == "script_started" and event.action]
    if not again:
        return ""
    times = f" {len(again)} times" if len(again) > 1 else ""
    on = f" on {nodes_text(again[-1].nodes)}" if again[-1].nodes else ""
    return f"the script was started again{times}{on}"


def _moves(left: Sequence[RunReport]) -> str:
    """Return how a job came to its last attempt: each may have had several checks."""
    steps: dict[int, list[str]] = {}
    for run in left:
        steps.setdefault(run.attempt, []).extend(_outcome(run))
    if len(steps) == 1:
        (only,) = steps.values()
        return ", ".join(only if only and "requeued" in only[-1] else [*only, "requeued"])
    if any(run.requeued for run in left):
        return "; ".join(", ".join(each) for each in steps.values())
    drained, excluded = (nodes_text(_nodes_of(left, act)) for act in ("drain", "exclude"))
    texts = [f"drained {drained}"] if drained else []
    without = f" without {excluded}" if excluded else ""
    return ", ".join([*texts, f"requeued {len(steps)} times{without}"])


def _going_on(run: RunReport) -> list[str]:
    """Return the nodes that the script got: those of the check without those given back."""
    back = _nodes_of([run], "drop")
    return [node.node for node in run.nodes if node.node not in back]


def _nodes_of(runs: Sequence[RunReport], action: str) -> list[str]:
    """Return the nodes on which an act took effect."""
    acts = (act for run in runs for act in run.acts)
    done = (act for act in acts if act.action == action and act.progress is Progress.DONE)
    return list(dict.fromkeys(node for act in done for node in act.nodes))


def _without_reasons(text: str, run: RunReport) -> str:
    """Return a text without the reasons of nodes, which stand where it says what was found."""
    text = text.removesuffix(_asked_of_user(run)).rstrip("; ")
    for node in run.nodes:
        if node.verdict and node.verdict.reason:
            said = f"{node.node}: {node.verdict.reason}"
            text = text.replace(f"{said}; ", "").removesuffix(said).rstrip(": ")
    return text


def _asked_of_user(run: RunReport) -> str:
    """Return what a job that ended asks of its user, by its last words: `submit the job again`."""
    words = run.reason.rpartition("; ")[2]
    return words if run.disposition == "stop" and words.startswith("submit ") else ""


def _next(report: JobReport, *, followed: bool) -> str:
    last = _latest(report)
    if _still_runs(last) and not report.ended and not last.hang:
        apart = no_exchange(last)
        steps = [apart.advice(report.job, runs=_has_begun(last))] if apart else []
        steps += [] if followed else [f"slurm-health report --follow {report.job} follows it"]
        return "; ".join(dict.fromkeys([*steps, *_about_slow(last)]))
    return "; ".join(dict.fromkeys(text for text in _steps(report, last) if text))


def _steps(report: JobReport, last: RunReport) -> Iterator[str]:
    """Return what there is to do, the job first."""
    ended = last.script is not None and last.script.exit_code not in (0, None)
    failed = ended and not last.requeued
    if last.unchecked:
        yield last.unchecked.remedy
    if last.post_mortem:
        yield last.post_mortem.advice
    if last.hang:
        runs = _still_runs(last) and not report.ended
        why = last.hang.diagnosed
        yield "" if why is None else why.advice if runs else advice_afterwards(why)
    elif report.ended:
        yield "what ended it may stand at the end of the job's output"
    elif failed and not last.post_mortem:
        yield "the job's output says why the script failed"
    yield from _about_slow(last)
    apart = no_exchange(last)
    if apart:
        yield apart.advice(report.job, runs=_has_begun(last) and _still_runs(last))
    held = any(act.action == "hold" and act.progress is not Progress.FAILED for act in last.acts)
    if held and not report.ended:
        yield f"to run it anyway: scontrol release {report.job}"
    yield _asked_of_user(last)
    yield from _about_nodes(report, last)


def _about_slow(run: RunReport) -> Iterator[str]:
    for event in _latest_of_kind(run):
        if event.diagnosed and event.diagnosed.advice:
            yield event.diagnosed.advice


def _about_nodes(report: JobReport, last: RunReport) -> Iterator[str]:
    bad = [node.node for node in report.nodes if node.level in (Level.FAULTY, Level.SLOW)]
    drained = [node for node in _nodes_of(report.runs, "drain") if node in bad]
    kept = [node for node in _going_on(last) if node in bad and last.disposition == "proceed"]
    told = [node for node in bad if node not in drained] + [*likelier(report)]
    if kept:
        option = f"submit again {_leaving_out(kept, last)}"
        yield f"to run without {nodes_text(kept)}: {option}{_if_there_are_nodes(last)}"
    names = nodes_text(told)
    about = [f"{names} (slurm-health history {names} has all that is known)"] if told else []
    about += [f"the network between {' and '.join(path.ends)}" for path in report.paths]
    for path in [path for path in report.paths if len(path.ends) > 1][:_ROWS]:
        slow = "be slowed down" if path.level is Level.SLOW else "hang"
        both = " and ".join(path.ends)
        yield f"a job on both {both} may {slow}: to avoid that, --exclude={path.ends[-1]}"
    about += [f"the network of {' and '.join(leaf.ends)}" for leaf in report.leaves]
    if about:
        yield f"tell your administrators about {', and about '.join(about[:_ROWS])}"
    if drained:
        stay = "stays drained until it is" if len(drained) == 1 else "stay drained until they are"
        yield f"{nodes_text(drained)} {stay} repaired"


def _leaving_out(nodes: Sequence[str], run: RunReport) -> str:
    """Name the options: sbatch refuses a node that is both asked for and excluded."""
    said = _BY_NAME.search(run.reason)
    asked = {name for name in nodes if said and name in _expanded(said[1])}
    how = [f"without {nodes_text(sorted(asked))} in --nodelist"] if asked else []
    others = [name for name in nodes if name not in asked]
    how += [f"with --exclude={nodes_text(others)}"] if others else []
    return " and ".join(how)


def _expanded(names: str) -> set[str]:
    with contextlib.suppress(ValueError):
        return set(expand(names))
    return set()


def _if_there_are_nodes(run: RunReport) -> str:
    """Return what else it takes to run without nodes, where Slurm has no others at once."""
    if "ask for fewer (" in run.reason:
        return " and fewer nodes (--nodes): its partition has no others"
    return ", which waits for other nodes" if "have to wait for" in run.reason else ""


def _has_begun(run: RunReport) -> bool:
    return run.script is not None


def _still_runs(run: RunReport) -> bool:
    """Tell whether the check or the script has not ended, as far as the journal tells."""
    script = run.script is not None and run.script.exit_code is None
    ended = run.superseded or run.post_mortem is not None or bool(run.requeued)
    return run.state is State.RUNNING or (script and not ended)
