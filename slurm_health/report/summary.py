# SPDX-License-Identifier: Apache-2.0
"""What a reader of a report needs first: the outcome, what was found and done, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from slurm_health.records.script_records import (
    Attribution,
    EventKind,
    TrainingEvent,
    advice_afterwards,
)
from slurm_health.records.text import NOTHING, counted, cut, duration_text, listed, ranks_text
from slurm_health.records.verdict import Level, Outcome, Severity
from slurm_health.report.sentences import (
    SEVERITIES,
    WORDS,
    act_text,
    cause_text,
    event_text,
    levels_text,
    nodes_text,
    script_text,
    times_text,
    whose_text,
)
from slurm_health.report.story import (
    WORST_FIRST,
    Act,
    Node,
    Progress,
    Run,
    Script,
    State,
    Story,
)

_REASON = 160  # characters of one reason: the table below has all of it
_ROWS = 3  # findings of a kind: the rest is only named
_ALMOST_CERTAIN = 0.99


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: how bad it is, what it is, and why."""

    severity: Severity
    what: str
    why: str = ""

    @property
    def text(self) -> str:
        """The whole sentence."""
        return f"{self.what}: {self.why}" if self.why else self.what


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs first: the outcome, what was found and done, and what to do next."""

    outcome: str
    headline: Finding
    found: tuple[Finding, ...]
    done: tuple[str, ...]
    next: tuple[str, ...]


def summary_of(story: Story, *, followed: bool = False) -> Summary:
    """Return a job's story in a few sentences; `followed`: its reader sees it go on."""
    outcome, headline = _headline(story)
    if headline.severity is not Severity.INFO or story.last.attempt:
        headline = msgspec.structs.replace(headline, what=_way_text(story) + headline.what)
    return Summary(
        outcome=outcome,
        headline=headline,
        found=tuple(_found(story)),
        done=tuple(filter(None, acts_texts(story))),
        next=tuple(dict.fromkeys(filter(None, _next(story, followed=followed)))),
    )


def _way_text(story: Story) -> str:
    """Return how the job came to where it is: from attempt to attempt, from start to start."""
    last, script = story.last, story.training.script
    parts = []
    if last.attempt:
        here = {node.node for node in last.nodes}
        left = [node for node in story.left if node.node not in here]
        away = f"moved away from {listed([n.node for n in left])}" if left else "requeued"
        parts.append(f"attempt {last.attempt + 1}: {away}")
    if script is not None and script.restarts:
        whys = Counter(cut(cause_text(cause), _REASON) for cause in script.restarted_after)
        for why, count in whys.most_common(_ROWS):
            parts.append(f"{why} ({times_text(count)})" if count > 1 else why)
        on = f" on {nodes_text(script.nodes)}" if script.nodes else ""
        times = f" {times_text(script.restarts)}" if script.restarts > 1 else ""
        parts.append(f"restarted{times}{on}")
    return "".join(f"{part}; " for part in parts)


def _headline(story: Story) -> tuple[str, Finding]:
    """Return in one word and one sentence how the job stands."""
    run = story.training
    cause, hang, script = run.post_mortem, run.hang, run.script
    if run.script_runs and not story.ended:
        if hang is not None:
            why = (
                f"{cause_text(hang.diagnosed)} ({whose_text(hang.diagnosed)})"
                if hang.diagnosed
                else ""
            )
            return "hangs", Finding(severity=Severity.ERROR, what=event_text(hang), why=why)
        assert script is not None
        return "running", Finding(severity=Severity.OK, what=progress_text(script, story.now_s))
    if story.waits:
        why = run.requeued or (script_text(script) if script else "")
        return "waiting", Finding(severity=Severity.INFO, what=f"the job is {story.waits}", why=why)
    if story.ended:
        return "ended", Finding(severity=Severity.UNDECIDED, what=story.ended)
    if cause is not None and cause.attribution == Attribution.OUTSIDE:
        by = f" by {story.cancelled_by}" if story.cancelled_by else ""
        what = f"{cause.description}{by}{' while it hung' if hang else ''}"
        return "ended", Finding(severity=Severity.UNDECIDED, what=what)
    if cause is not None:
        return "failed", Finding(severity=Severity.ERROR, what=cause_text(cause))
    if run.requeued:
        return "requeued", Finding(severity=Severity.INFO, what=run.requeued)
    if script is not None and script.exit_code is not None:
        well = script.exit_code == 0 and not script.signal
        what = script_text(script)
        severity = Severity.OK if well else Severity.ERROR
        return "finished" if well else "failed", Finding(severity=severity, what=what)
    if script is not None:
        return "unknown", Finding(severity=Severity.INFO, what=script_text(script))
    return _check_headline(story.last)


def _check_headline(run: Run) -> tuple[str, Finding]:
    """Return how a job stands that has no script, or none yet."""
    nodes = f"{nodes_text([node.node for node in run.nodes])}: " if run.nodes else ""
    if run.unchecked:
        return "unchecked", Finding(severity=Severity.UNDECIDED, what=run.unchecked.reason)
    if run.state is State.NOT_STARTED:
        return "unknown", Finding(severity=Severity.INFO, what=run.note)
    if run.state is State.RUNNING:
        return "checking", Finding(severity=Severity.INFO, what=f"{nodes}{_check_progress(run)}")
    if run.state is State.STOPPED:
        return "stopped", Finding(severity=Severity.UNDECIDED, what=f"{nodes}{run.note}")
    word, what, severity = _DISPOSITIONS.get(run.disposition, ("checked", "", Severity.OK))
    if what:
        return word, Finding(severity=severity, what=what, why=run.reason)
    levels = {node.level for node in run.nodes}
    bad = [SEVERITIES[level] for level in WORST_FIRST if level in levels] if run.judged else []
    took = "" if run.duration_s is None else f" in {duration_text(run.duration_s)}"
    checked = f"{nodes_text([node.node for node in run.nodes])} checked{took}"
    return word, Finding(severity=bad[0] if bad else Severity.UNDECIDED, what=checked)


_DISPOSITIONS = {
    "requeue": ("requeued", "the job waits for its next attempt", Severity.WARNING),
    "stop": ("stopped", "the job ended before its script began", Severity.ERROR),
}


def progress_text(script: Script, now_s: float | None) -> str:
    """Return `running for 2 min 10 s, step 595 of 1000`."""
    ran_s = now_s - script.started_s if now_s and script.started_s else None
    parts = [f"running for {duration_text(ran_s)}" if ran_s is not None else "running"]
    seen = script.seen
    if seen is not None and seen.step:
        of = f" of {script.steps}" if script.steps else ""
        pace = f", {duration_text(script.step_ms / 1000)} a step" if script.step_ms else ""
        age_s = seen.age_s + (now_s - script.seen_s if now_s else 0.0)
        ago = f" ({duration_text(age_s)} ago)" if age_s >= 60.0 else ""
        parts.append(f"step {seen.step}{of}{ago}{pace}")
    if seen is not None and seen.stopped:
        are = "is" if len(seen.stopped) == 1 else "are"
        parts.append(f"{ranks_text(seen.stopped)} on {seen.node} {are} stopped")
    return ", ".join(parts)


def _check_progress(run: Run) -> str:
    """Return how far a check has got that runs."""
    if run.judged:
        return "acting on the verdict"
    if not run.rounds:
        ready = sum(node.hardware is not None for node in run.nodes)
        return f"loading, {ready} of {len(run.nodes)} nodes ready"
    last = run.rounds[-1]
    if last.duration_s is not None:
        return f"round {last.round} has ended"
    done = sum(None not in group.elapsed_s for group in last.groups)
    what = "nodes" if all(len(group.nodes) == 1 for group in last.groups) else "pairs"
    return f"round {last.round}: {done} of {len(last.groups)} {what} done"


def _found(story: Story) -> Iterator[Finding]:
    last, run = story.last, story.training
    if run.post_mortem and run.post_mortem.attribution != Attribution.OUTSIDE:
        fault = listed(run.post_mortem.accused)
        why = f"{fault} {'is' if len(run.post_mortem.accused) == 1 else 'are'} at fault"
        what = whose_text(run.post_mortem)
        yield Finding(severity=Severity.ERROR, what=what, why=why if fault else "")
    yield from _events(run, hang=not run.script_runs)
    apart = no_connectivity(last)
    if apart:
        yield Finding(severity=Severity.UNDECIDED, what=apart.what, why=apart.why)
    else:
        suspects = _prime_suspects(story)
        yield from _bad_nodes([node for node in story.nodes if node.node not in suspects])
        yield from suspects.values()
    links = [*(("path", path) for path in story.paths), *(("leaf", leaf) for leaf in story.leaves)]
    for kind, link in links[: 2 * _ROWS]:
        what = f"{kind} {NOTHING.join(link.ends)} {link.level.value} ({_sure(link.probability)})"
        why = cut(link.reason, _REASON)
        yield Finding(severity=SEVERITIES[link.level], what=what, why=why)
    if last.nodes and not (last.judged and (any(node.is_bad for node in story.nodes) or links)):
        who = nodes_text([node.node for node in last.nodes])
        severity = Severity.OK if last.judged else Severity.INFO
        text = levels_text(last)
        if run.script or (last.judged and last.state is not State.RUNNING):
            yield Finding(
                severity=severity, what=f"before the script, {who}" if run.script else who, why=text
            )
    if any(run.missing and not run.unchecked for run in story.runs):
        text = "parts of the journal are missing or cannot be read: see below"
        yield Finding(severity=Severity.INFO, what=text)


def _events(run: Run, *, hang: bool) -> Iterator[Finding]:
    """Yield what was seen of the training, the latest of a kind and cause; hangs if `hang`."""
    latest: dict[tuple[EventKind, str], tuple[TrainingEvent, str]] = {}
    for event in run.events[run.since_start :]:
        key = event.event, event.diagnosed.cause if event.diagnosed else ""
        if event.event is EventKind.HANG_OVER:
            hung = [found for found in latest if found[0] is EventKind.HANG]
            if hung:
                over = f"; it went on after {duration_text(event.stalled_s)}"
                latest[hung[-1]] = latest[hung[-1]][0], over
        elif hang or event.event is not EventKind.HANG:
            latest[key] = event, ""
    for event, over in latest.values():
        cause = event.diagnosed
        why = f"{cause.description} ({whose_text(cause)})" if cause else ""
        yield Finding(severity=Severity.WARNING, what=event_text(event), why=f"{why}{over}")


def _bad_nodes(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the nodes that are not well, worst first; those that say the same share a finding."""
    same: dict[tuple[Level | None, str, str], list[str]] = {}
    for level in WORST_FIRST:
        for node in nodes:
            if node.level is level and node.is_bad:
                part = node.component if node.component != "node" else ""
                sure = _sure(node.probability) if level is not Level.INCONCLUSIVE else ""
                known = ", ".join(filter(None, (part, sure)))
                same.setdefault((level, known, cut(node.reason, _REASON)), []).append(node.node)
    findings = [
        Finding(
            severity=SEVERITIES[level],
            what=f"{nodes_text(names)} {WORDS[level]}{f' ({known})' if known else ''}",
            why=reason,
        )
        for (level, known, reason), names in same.items()
        if level
    ]
    yield from findings[:_ROWS]
    rest = [name for names in list(same.values())[_ROWS:] for name in names]
    if rest:
        what = f"and {counted(len(rest), 'more node')}, see below"
        yield Finding(severity=findings[_ROWS].severity, what=what)


def _sure(probability: float | None) -> str:
    if probability is None or probability >= _ALMOST_CERTAIN:
        return "over 99 % sure"
    return f"{100 * probability:.0f} % sure"


class NoConnectivity(NamedTuple):
    """The nodes of which no two exchanged data, and that in words."""

    nodes: tuple[str, ...]
    what: str
    why: str


def no_connectivity(run: Run) -> NoConnectivity | None:
    """Return what stands behind nodes that are all undecided, None if it is something else."""
    met = [group for told in run.rounds for group in told.groups if len(group.nodes) > 1]
    failed = all(group.outcome in (Outcome.FAILED, Outcome.TIMED_OUT) for group in met)
    undecided = all(node.level is Level.INCONCLUSIVE for node in run.nodes)
    nodes = tuple(node.node for node in run.nodes)
    if not (run.judged and met and failed and undecided and len(nodes) > 1):
        return None
    if {node for group in met for node in group.nodes} != {*nodes}:
        return None
    used = dict.fromkeys(node.hardware.interface for node in run.nodes if node.hardware)
    over = f" over {', '.join(filter(None, used))}" if any(used) else ""
    said = Counter(
        text.removeprefix(f"{node}: ")
        for group in met
        for node in group.nodes
        for text in group.details
        if text.startswith(f"{node}: ")
    )
    why = said.most_common(1)[0][0] if said else ""
    if len(nodes) == 2:
        why = "; ".join(filter(None, (why, "nothing shows which of them is at fault")))
        return NoConnectivity(nodes, f"{' and '.join(nodes)} cannot exchange data{over}", why)
    return NoConnectivity(nodes, f"no two of {listed(nodes)} can exchange data{over}", why)


def _prime_suspects(story: Story) -> dict[str, Finding]:
    """Return, of two nodes that could not exchange data, the one that is likelier to be why.

    A later check of the same job found the other one healthy, with another partner, and has not
    judged this one.
    """
    suspects = {}
    for place, run in enumerate(story.runs):
        apart = no_connectivity(run)
        later = [n for after in story.runs[place + 1 :] if after.judged for n in after.nodes]
        levels = {node.node: node.level for node in later}
        known = [node for node in apart.nodes if node in levels] if apart else []
        if apart and len(apart.nodes) == 2 and [levels[n] for n in known] == [Level.HEALTHY]:
            (other,) = {*apart.nodes} - {*known}
            what = f"{other} cannot exchange data with {known[0]}, which can with other nodes"
            why = "it is the likelier of the two to be at fault, but that is not proven"
            suspects[other] = Finding(severity=Severity.UNDECIDED, what=what, why=why)
    return suspects


def acts_texts(story: Story) -> Iterator[str]:
    """Yield what was done to nodes and the job, that of all attempts together."""
    same: dict[tuple[str, Progress, str], list[Act]] = {}
    for run in story.runs:
        for act in run.actions:
            same.setdefault((act.action, act.progress, act.detail), []).append(act)
    excluded = listed(list(dict.fromkeys(n for run in story.runs for n in run.acted_on("exclude"))))
    requeued = any(a == "requeue" and p is Progress.DONE for a, p, _ in same)
    for (action, progress, why), acts in same.items():
        nodes = list(dict.fromkeys(node for act in acts for node in act.nodes))
        if action == "proceed" and progress is not Progress.FAILED:
            continue
        if progress is Progress.INTENDED:
            yield f"began to {act_text('plain', action, nodes)}, result not recorded"
        elif progress is Progress.FAILED:
            yield f"{act_text('failed', action, nodes)} ({why or 'cause not recorded'})"
        elif action == "requeue":
            times = f" {times_text(len(acts))}" if len(acts) > 1 else ""
            yield f"requeued{times}{f' without {excluded}' if excluded else ''}"
        elif action != "exclude" or not requeued:
            yield act_text("done", action, nodes)
    yield from _ending(story.last)
    if story.over_in_slurm is False and story.training.script and not story.training.script_runs:
        yield "the job itself still runs" if not story.waits else ""
    if story.cancelled_by and not (story.training.post_mortem):
        yield f"cancelled by {story.cancelled_by}"


def _ending(run: Run) -> Iterator[str]:
    """Yield what the check let become of the job, if its acts do not show it."""
    acted = {act.action for act in run.actions}
    reason = run.reason
    for node in run.nodes:  # what is said of nodes stands above
        reason = reason.replace(f"{node.node}: {node.reason}; ", "") if node.reason else reason
    if run.disposition == "requeue" and "requeue" not in acted:
        yield "will be requeued"
    elif run.disposition == "proceed" and any(
        node.level is not Level.HEALTHY for node in run.nodes
    ):
        fewer = [a.nodes for a in run.actions if a.action == "proceed" and a.nodes]
        if fewer:
            yield f"continued with {listed(fewer[-1])}"
        yield reason if run.judged else ""


def _next(story: Story, *, followed: bool) -> Iterator[str]:
    """Yield what there is to do, the job first."""
    last, run = story.last, story.training
    runs = (run.script_runs or last.state is State.RUNNING) and not story.ended
    hang = run.hang
    if runs and hang is None and not followed:
        yield f"slurm-health report --follow {story.job} follows it"
    if last.unchecked:
        yield last.unchecked.remedy
    if run.post_mortem:
        yield run.post_mortem.advice
    if hang is not None and hang.diagnosed:
        yield hang.diagnosed.advice if runs else advice_afterwards(hang.diagnosed)
    elif story.ended:
        yield "what ended it may stand at the end of the job's output"
    elif run.script and run.script.exit_code and not (run.post_mortem or run.requeued):
        yield "the job's output says why the script failed"
    for event in run.events[run.since_start :]:
        if event.diagnosed and event.event is not EventKind.HANG:
            yield event.diagnosed.advice
    apart = no_connectivity(last)
    if apart:
        names = "NCCL_SOCKET_IFNAME, without GPUs GLOO_SOCKET_IFNAME, names another"
        yield f"look at the interface ({names}) and at firewalls between the nodes"
        if run.script_runs:
            yield f"a script that needs them together will hang: scancel {story.job} ends it"
        if len(apart.nodes) == 2:
            yield "with --spares=1 a third node shows which of two is at fault"
    yield from _about_nodes(story)


def _about_nodes(story: Story) -> Iterator[str]:
    bad = [node.node for node in story.nodes if node.level in (Level.FAULTY, Level.SLOW)]
    left = {node.node for node in story.left}
    drained = {node for run in story.runs for node in run.acted_on("drain")}
    kept = [node for node in bad if node not in left and story.last.disposition == "proceed"]
    if kept:
        names = listed(kept)
        yield f"to run without {names}: submit with --exclude={names}, and without it in --nodelist"
    suspects = _prime_suspects(story)
    told = listed([node for node in [*bad, *suspects] if node not in drained])
    about = [f"{told} (slurm-health history NODE shows what is known)"] if told else []
    for path in [path for path in story.paths if len(path.ends) > 1][:_ROWS]:
        may, both = (
            "be slowed down" if path.level is Level.SLOW else "hang",
            " and ".join(path.ends),
        )
        yield f"a job on both {both} may {may}: to avoid that, --exclude={path.ends[-1]}"
    links = [*story.paths, *story.leaves]
    about += [f"the network between {' and '.join(link.ends)}" for link in links[:_ROWS]]
    if about:
        yield f"tell your administrators about {', and about '.join(about)}"
    if repairs := [node for node in bad if node in drained]:
        stay = "stays drained until it is" if len(repairs) == 1 else "stay drained until they are"
        yield f"{listed(repairs)} {stay} repaired"
