# SPDX-License-Identifier: Apache-2.0
"""The summary of a report: the outcome, findings, acts, and what to do next."""

from __future__ import annotations

import shlex
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
from slurm_health.records.verdict import Level, Outcome, Severity, StorageBlame
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
_ROWS = 3  # findings of a kind: the rest is only counted
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
    """A job in a few sentences; `outcome` is one word, `next` what its user can do."""

    outcome: str
    headline: Finding
    findings: tuple[Finding, ...]
    done: tuple[str, ...]
    next: tuple[str, ...]


def summary_of(story: Story, *, followed: bool = False) -> Summary:
    """Return a job's story in a few sentences; `followed`: its reader watches it.

    The headline begins with the way to this outcome, from attempt to attempt and start to start.
    """
    outcome, headline = _headline(story)
    last, script = story.last, story.training.script
    way = []
    if last.attempt:
        here = {node.node for node in last.nodes}
        left = [node.node for node in story.left if node.node not in here]
        away = f"moved away from {listed(left)}" if left else "requeued"
        way.append(f"attempt {last.attempt + 1}: {away}")
    if script and script.restarts and (way or headline.severity is not Severity.INFO):
        causes = Counter(cut(cause_text(cause), _REASON) for cause in script.restarted_after)
        for cause, count in causes.most_common(_ROWS):
            way.append(f"{cause} ({times_text(count)})" if count > 1 else cause)
        on = f" on {nodes_text(script.nodes)}" if script.nodes else ""
        times = f" {times_text(script.restarts)}" if script.restarts > 1 else ""
        way.append(f"restarted{times}{on}")
    return Summary(
        outcome=outcome,
        headline=msgspec.structs.replace(headline, what="; ".join([*way, headline.what])),
        findings=tuple(_findings(story)),
        done=tuple(filter(None, acts_texts(story))),
        next=tuple(dict.fromkeys(filter(None, _next(story, followed=followed)))),
    )


def _headline(story: Story) -> tuple[str, Finding]:
    """Return the state of a job in one word and one sentence."""
    run = story.training
    cause, hang, script = run.post_mortem, run.hang, run.script
    if run.script_runs and not story.ended:
        if hang is not None:
            known = hang.diagnosed
            why = f"{cause_text(known)} ({whose_text(known)})" if known else ""
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
    if script is None:
        return _check_headline(story.last)
    what = script_text(script)
    if script.exit_code is None:
        return "unknown", Finding(severity=Severity.INFO, what=what)
    if script.exit_code or script.signal:
        return "failed", Finding(severity=Severity.ERROR, what=what)
    return "finished", Finding(severity=Severity.OK, what=what)


def _check_headline(run: Run) -> tuple[str, Finding]:
    """Return the state of a job that has no script, or none yet."""
    if run.unchecked:
        return "unchecked", Finding(severity=Severity.UNDECIDED, what=run.unchecked.reason)
    if run.state is State.NOT_STARTED:
        return "unknown", Finding(severity=Severity.INFO, what=run.note)
    names = nodes_text([node.node for node in run.nodes])
    on = f"{names}: " if names else ""
    if run.state is State.STOPPED:
        return "stopped", Finding(severity=Severity.UNDECIDED, what=f"{on}{run.note}")
    if run.state is State.RUNNING:
        if run.judged:
            progress = "acting on the verdict"
        elif not run.rounds:
            ready = sum(node.hardware is not None for node in run.nodes)
            progress = f"loading, {ready} of {len(run.nodes)} nodes ready"
        elif run.rounds[-1].duration_s is not None:
            progress = f"{run.rounds[-1].name} has ended"
        else:
            groups = run.rounds[-1].groups
            done = sum(None not in group.elapsed_s for group in groups)
            what = "nodes" if all(len(group.nodes) == 1 for group in groups) else "pairs"
            progress = f"{run.rounds[-1].name}: {done} of {len(groups)} {what} done"
        return "checking", Finding(severity=Severity.INFO, what=f"{on}{progress}")
    word, what, severity = _DISPOSITIONS.get(run.disposition, ("checked", "", Severity.OK))
    if what:
        return word, Finding(severity=severity, what=what, why=run.reason)
    levels = {node.level for node in run.nodes}
    worst = next((level for level in WORST_FIRST if level in levels), Level.INCONCLUSIVE)
    took = "" if run.duration_s is None else f" in {duration_text(run.duration_s)}"
    severity = SEVERITIES[worst] if run.judged else Severity.UNDECIDED
    return word, Finding(severity=severity, what=f"{names} checked{took}")


_DISPOSITIONS = {
    "requeue": ("requeued", "the job waits for its next attempt", Severity.WARNING),
    "stop": ("stopped", "the job ended before its script began", Severity.ERROR),
}


def progress_text(script: Script, now_s: float | None) -> str:
    """Return `running for 2 min 10 s, step 595 of 1000`."""
    ran_s = now_s - script.started_s if now_s and script.started_s else None
    parts = [f"running for {duration_text(ran_s)}" if ran_s is not None else "running"]
    progress = script.seen
    if progress is not None and progress.step:
        of = f" of {script.steps}" if script.steps else ""
        pace = f", {duration_text(script.step_ms / 1000)} a step" if script.step_ms else ""
        age_s = progress.age_s + (now_s - script.seen_s if now_s else 0.0)
        ago = f" ({duration_text(age_s)} ago)" if age_s >= 60.0 else ""
        parts.append(f"step {progress.step}{of}{ago}{pace}")
    if progress is not None and progress.waits:
        parts.append(f"a pause ({progress.waits})")
    if progress is not None and progress.saved:
        saved_s = progress.saved_age_s + (now_s - script.seen_s if now_s else 0.0)
        parts.append(f"last checkpoint {duration_text(saved_s)} ago ({progress.saved})")
    if progress is not None and progress.stopped:
        are = "is" if len(progress.stopped) == 1 else "are"
        parts.append(
            f"{ranks_text(progress.stopped)} on {nodes_text(progress.stopped_on)} {are} stopped"
        )
    return ", ".join(parts)


def _findings(story: Story) -> Iterator[Finding]:
    last, run = story.last, story.training
    if run.post_mortem and run.post_mortem.attribution != Attribution.OUTSIDE:
        accused = run.post_mortem.accused
        why = f"{listed(accused)} {'is' if len(accused) == 1 else 'are'} at fault"
        what = whose_text(run.post_mortem)
        yield Finding(severity=Severity.ERROR, what=what, why=why if accused else "")
    yield from _event_findings(run)
    for node in [node for node in last.nodes if node.held][:_ROWS]:
        what = f"{node.node} was not free after the job"
        yield Finding(severity=Severity.WARNING, what=what, why=node.held)
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
    for verdict in last.storage[:_ROWS]:
        yield Finding(severity=SEVERITIES[verdict.level], what=verdict.reason)
    bad = last.judged and (links or last.storage or any(node.is_bad for node in story.nodes))
    if last.nodes and not bad and (run.script or (last.judged and last.state is not State.RUNNING)):
        names = nodes_text([node.node for node in last.nodes])
        yield Finding(
            severity=Severity.OK if last.judged else Severity.INFO,
            what=f"before the script, {names}" if run.script else names,
            why=levels_text(last),
        )
    if any(run.missing and not run.unchecked for run in story.runs):
        text = "parts of the journal are missing or cannot be read: see below"
        yield Finding(severity=Severity.INFO, what=text)


def _event_findings(run: Run) -> Iterator[Finding]:
    """Yield the events of the training, the latest of a kind and cause.

    While the script runs, its hang is the headline.
    """
    latest: dict[tuple[EventKind, str], tuple[TrainingEvent, str]] = {}
    for event in run.events[run.since_start :]:
        key = event.event, event.diagnosed.cause if event.diagnosed else ""
        if event.event is EventKind.HANG_OVER:
            hangs = [kind for kind in latest if kind[0] is EventKind.HANG]
            if hangs:
                over = f"; it went on after {duration_text(event.stalled_s)}"
                latest[hangs[-1]] = latest[hangs[-1]][0], over
        elif event.event is not EventKind.HANG or not run.script_runs:
            latest[key] = event, ""
    if run.script and run.script.unwatched:
        times = [f"{duration_text(a)} to {duration_text(b)}" for a, b in run.script.unwatched]
        yield Finding(
            severity=Severity.UNDECIDED,
            what=f"the training was not watched from {' and from '.join(times)} after its start",
            why="its watch recorded nothing then, so a hang of that time is not known",
        )
    for event, over in latest.values():
        cause = event.diagnosed
        why = f"{cause.description} ({whose_text(cause)})" if cause else ""
        yield Finding(severity=Severity.WARNING, what=event_text(event), why=f"{why}{over}")


def _bad_nodes(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the bad nodes, worst first; those with the same reason share a finding."""
    same: dict[tuple[Level | None, str, str], list[str]] = {}
    for level in WORST_FIRST:
        for node in nodes:
            if node.level is level and node.is_bad:
                part = node.component if node.component != "node" else ""
                sure = _sure(node.probability) if level is not Level.INCONCLUSIVE else ""
                note = ", ".join(filter(None, (part, sure)))
                same.setdefault((level, note, cut(node.reason, _REASON)), []).append(node.node)
    findings = [
        Finding(
            severity=SEVERITIES[level],
            what=f"{nodes_text(names)} {WORDS[level]}{f' ({note})' if note else ''}",
            why=reason,
        )
        for (level, note, reason), names in same.items()
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
    """Return the nodes of a check if no two of them exchanged data and all are undecided."""
    groups = [group for a_round in run.rounds for group in a_round.groups if len(group.nodes) > 1]
    failed = all(group.outcome in (Outcome.FAILED, Outcome.TIMED_OUT) for group in groups)
    undecided = all(node.level is Level.INCONCLUSIVE for node in run.nodes)
    nodes = tuple(node.node for node in run.nodes)
    if not (run.judged and groups and failed and undecided and len(nodes) > 1):
        return None
    if {node for group in groups for node in group.nodes} != {*nodes}:
        return None
    interfaces = dict.fromkeys(node.hardware.interface for node in run.nodes if node.hardware)
    over = f" over {', '.join(filter(None, interfaces))}" if any(interfaces) else ""
    details = Counter(
        text.removeprefix(f"{node}: ")
        for group in groups
        for node in group.nodes
        for text in group.details
        if text.startswith(f"{node}: ")
    )
    why = details.most_common(1)[0][0] if details else ""
    if len(nodes) == 2:
        why = "; ".join(filter(None, (why, "nothing shows which of them is at fault")))
        return NoConnectivity(nodes, f"{' and '.join(nodes)} cannot exchange data{over}", why)
    return NoConnectivity(nodes, f"no two of {listed(nodes)} can exchange data{over}", why)


def _prime_suspects(story: Story) -> dict[str, Finding]:
    """Return, of two nodes that could not exchange data, the likelier one to be at fault.

    A later check of the same job has judged the other one healthy, with another partner, and has
    not judged this one.
    """
    suspects = {}
    for place, run in enumerate(story.runs):
        apart = no_connectivity(run)
        if apart is None or len(apart.nodes) != 2:
            continue
        later = [n for after in story.runs[place + 1 :] if after.judged for n in after.nodes]
        levels = {node.node: node.level for node in later if node.node in apart.nodes}
        if [*levels.values()] == [Level.HEALTHY]:
            (healthy,) = levels
            (other,) = {*apart.nodes} - {healthy}
            what = f"{other} cannot exchange data with {healthy}, which can with other nodes"
            why = "it is the likelier of the two to be at fault, but that is not proven"
            suspects[other] = Finding(severity=Severity.UNDECIDED, what=what, why=why)
    return suspects


def acts_texts(story: Story) -> Iterator[str]:
    """Yield the acts on nodes and the job, those of all attempts together."""
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
    yield from _disposition_texts(story.last)
    training = story.training
    runs_without_script = training.script is not None and not training.script_runs
    if story.over_in_slurm is False and runs_without_script and not story.waits:
        yield "the job itself still runs"
    if story.cancelled_by and not training.post_mortem:
        yield f"cancelled by {story.cancelled_by}"


def _disposition_texts(run: Run) -> Iterator[str]:
    """Yield the decision of the check about the job, unless its acts show it."""
    if run.disposition == "requeue" and all(act.action != "requeue" for act in run.actions):
        yield "will be requeued"
    if run.disposition != "proceed" or all(node.level is Level.HEALTHY for node in run.nodes):
        return
    fewer = [act.nodes for act in run.actions if act.action == "proceed" and act.nodes]
    if fewer:
        yield f"continued with {listed(fewer[-1])}"
    reason = run.reason
    for node in run.nodes:  # the findings have the reasons of nodes
        reason = reason.replace(f"{node.node}: {node.reason}; ", "") if node.reason else reason
    if run.judged:
        yield reason


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
        looks = "the cause is being looked for; this report has it in some seconds"
        yield (
            looks if story.over_in_slurm is False else "the job's output says why the script failed"
        )
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
    yield from _node_advice(story)


def _node_advice(story: Story) -> Iterator[str]:
    """Yield how to run without bad nodes, and what administrators need to know."""
    bad = [node.node for node in story.nodes if node.level in (Level.FAULTY, Level.SLOW)]
    left = {node.node for node in story.left}
    drained = {node for run in story.runs for node in run.acted_on("drain")}
    kept = [node for node in bad if node not in left and story.last.disposition == "proceed"]
    if kept:
        names = listed(kept)
        yield f"to run without {names}: submit with --exclude={names}, and without it in --nodelist"
    for path in [path for path in story.paths if len(path.ends) > 1][:_ROWS]:
        may = "be slowed down" if path.level is Level.SLOW else "hang"
        both = " and ".join(path.ends)
        yield f"a job on both {both} may {may}: to avoid that, --exclude={path.ends[-1]}"
    undrained = [node for node in [*bad, *_prime_suspects(story)] if node not in drained]
    which = shlex.quote(undrained[0]) if len(undrained) == 1 else "NODE"
    about = [f"{listed(undrained)} (slurm-health history {which} shows what is known)"]
    about = about if undrained else []
    links = [*story.paths, *story.leaves]
    about += [f"the network between {' and '.join(link.ends)}" for link in links[:_ROWS]]
    failing = [v.path for v in story.last.storage if v.blame is not StorageBlame.USER]
    about += [f"the storage of {path}" for path in failing[:_ROWS]]
    if about:
        yield f"tell your administrators about {', and about '.join(about)}"
    if repairs := [node for node in bad if node in drained]:
        stay = "stays drained until it is" if len(repairs) == 1 else "stay drained until they are"
        yield f"{listed(repairs)} {stay} repaired"
