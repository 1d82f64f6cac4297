# SPDX-License-Identifier: Apache-2.0
"""The report as text: one line per check, one row per kind of node, worst first, a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from slurm_health.core.verdict import Level
from slurm_health.report import details
from slurm_health.report.build import acted
from slurm_health.report.figures import ALLGATHER, MATMUL, unit_of
from slurm_health.report.layout import Page
from slurm_health.report.model import Event, JobReport, NodeReport, RunReport
from slurm_health.report.phrases import (
    NOTHING,
    WORST_FIRST,
    act_text,
    attempt_text,
    effort_text,
    found_text,
    nodes_text,
    outcome_texts,
    range_text,
    verb_of,
)
from slurm_health.report.post_mortem import post_mortems
from slurm_health.report.while_training import while_training

_ALWAYS_SHOWN = (ALLGATHER, MATMUL)
_PER_TFLOP = 1000.0
_SLOWER = " slower"  # in the reason of a node that is worth a word; processors' shares are not
_NOTED = 3  # healthy nodes that are slower than most: the slowest, before the rest is only named


def job_text(
    report: JobReport, *, width: int | None = None, unicode: bool = True, verbose: bool = False
) -> str:
    """Return the report of a job, without a newline at its end.

    Args:
        report: what to show.
        width: columns of the terminal, None to break no line.
        unicode: whether the output can show more than ASCII.
        verbose: tell all evidence, every group of every round, and every sample.
    """
    page = Page(width=width, unicode=unicode)
    checks = [page.phrases(_title(report)), *(page.phrases(_check(run)) for run in report.runs)]
    return _blocks(
        [line for lines in checks for line in lines],
        _missing(report.runs, page),
        _nodes(report, page),
        [*_links(report, page), *_slower_but_healthy(report.nodes, page)],
        details.unwell(report, page, whole=verbose),
        _timeline(report.runs, page, verbose=verbose),
        while_training(report.runs, page),
        post_mortems(report.runs, page),
        details.samples(report.runs, page) if verbose else [],
    )


def tasks_text(
    reports: Sequence[JobReport],
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    width: int | None = None,
    unicode: bool = True,
) -> str:
    """Return the tasks of an array, each by its last check and with its bad nodes by name.

    `others` are tasks without a journal, and why they have none. Arguments as for `job_text`.
    """
    page = Page(width=width, unicode=unicode)
    lines = [page.phrases([report.job, *_task(report)]) for report in reports]
    lines += [page.phrases([tasks, why]) for tasks, why in others.items()]
    how = f"slurm-health report {reports[0].job} shows one task whole."
    return _blocks([line for task in lines for line in task], page.paragraph(how))


def _task(report: JobReport) -> list[str]:
    last = report.runs[-1]
    found = [_node_list(last.nodes), found_text(last, names=True), *outcome_texts(last)]
    return [attempt_text(last), *found] if len(report.runs) > 1 else found


def check_summary(run: RunReport, *, width: int | None = None, unicode: bool = True) -> str:
    """Return the report of one check, as `slurm-health check` prints it at its end.

    Arguments as for `job_text`.
    """
    page = Page(width=width, unicode=unicode)
    first = page.phrases([headline(run), *outcome_texts(run)])
    notes = [*_links(run, page), *_slower_but_healthy(run.nodes, page)]
    return _blocks(first, _nodes(run, page), notes)


def headline(run: RunReport) -> str:
    """Return one check in one line: `n[1-5]: 3 rounds, 6.1 s: 1 faulty (n3)`."""
    parts = [_node_list(run.nodes), effort_text(run), found_text(run, names=True)]
    return ": ".join(part for part in parts if part)


def _blocks(*blocks: Sequence[str]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _node_list(nodes: Sequence[NodeReport]) -> str:
    return nodes_text(node.node for node in nodes)


def _title(report: JobReport) -> list[str]:
    started = [run.started for run in report.runs if run.started]
    job = report.job
    if started and started[-1].array == job:
        job = f"{job} ({started[-1].job_id})"
    place = f"{report.cluster}/{report.partition}" if report.partition else report.cluster
    attempts = len({run.attempt for run in report.runs})
    counts = f"{attempts} attempt{'s' if attempts != 1 else ''}"
    if len(report.runs) > attempts:
        counts += f", {len(report.runs)} checks"
    return [f"Job {job}", report.script, place, counts]


def facts_of(run: RunReport) -> list[str]:
    """Return one check in phrases: its nodes, its effort, what it found and led to."""
    return [phrase for phrase in _check(run)[1:] if phrase]


def _check(run: RunReport) -> list[str]:
    found = [attempt_text(run), _node_list(run.nodes), effort_text(run), found_text(run)]
    return [*found, *outcome_texts(run)]


def _missing(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return what of the journals is not there or cannot be read."""
    lines = []
    for run in runs:
        if run.missing:
            lacks = "; ".join(run.missing)
            lines += page.paragraph(f"missing in the journal of {attempt_text(run)}: {lacks}")
    return lines


# The nodes: rows that say the same are one.


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Nodes of which the same is to be said."""

    nodes: tuple[NodeReport, ...]
    level: Level | None
    reason: str

    def values(self, probe: str) -> list[float]:
        return [
            value
            for node in self.nodes
            for figure in node.figures
            if figure.probe == probe
            for value in figure.values
        ]


def _nodes(report: JobReport | RunReport, page: Page) -> list[str]:
    if not report.nodes:
        return []
    rows = _rows(report.nodes)
    columns: list[list[str]] = [
        ["NODES", *(_node_list(row.nodes) for row in rows)],
        ["VERDICT", *(row.level.value if row.level else NOTHING for row in rows)],
        *(_column(probe, rows) for probe in [*_ALWAYS_SHOWN, *_in_question(rows)]),
        ["REASON", *(row.reason for row in rows)],
    ]
    return page.table(list(zip(*columns, strict=True)))


def _rows(nodes: Sequence[NodeReport]) -> list[_Row]:
    """Return the rows, worst first. The healthy share one, and a reason only if all have it."""
    rows = []
    for level in WORST_FIRST:
        at_level = [node for node in nodes if node.level is level]
        by_reason: dict[str, list[NodeReport]] = {}
        for node in at_level:
            by_reason.setdefault(node.verdict.reason if node.verdict else "", []).append(node)
        if level in (Level.HEALTHY, None) and len(by_reason) > 1:
            by_reason = {"": at_level}
        rows += [
            _Row(nodes=tuple(same), level=level, reason=reason)
            for reason, same in by_reason.items()
        ]
    return rows


def _in_question(rows: Sequence[_Row]) -> list[str]:
    """Return the other probes that a node is not well in, by name."""
    unwell = [row for row in rows if row.level not in (Level.HEALTHY, None)]
    measured = {figure.probe for row in rows for node in row.nodes for figure in node.figures}
    named = {probe for probe in measured if any(probe in row.reason for row in unwell)}
    return sorted(named - set(_ALWAYS_SHOWN))


def _column(probe: str, rows: Sequence[_Row]) -> list[str]:
    """Return a column's head, and its text in each row."""
    unit = unit_of(probe)
    values = [row.values(probe) for row in rows]
    if probe == MATMUL and any(value >= _PER_TFLOP for row in values for value in row):
        unit = "TFLOP/s"
        values = [[value / _PER_TFLOP for value in row] for row in values]
    return [f"{probe.upper()} {unit}", *map(range_text, values)]


def _links(report: JobReport | RunReport, page: Page) -> list[str]:
    """Return what is said about paths and leaf switches."""
    lines = []
    for kind, judged in (("path", report.paths), ("leaf", report.leaves)):
        for path in judged:
            what = f"{kind} {NOTHING.join(path.ends)} {path.level.value}"
            lines += page.paragraph(f"{what}: {path.reason}" if path.reason else what)
    return lines


def _slower_but_healthy(nodes: Sequence[NodeReport], page: Page) -> list[str]:
    """Return what a job will wait for although nothing is wrong with it, the slowest first."""
    judged = [node.verdict for node in nodes if node.verdict and node.level is Level.HEALTHY]
    slower = sorted(
        (verdict for verdict in judged if verdict.slowdown > 1 and _SLOWER in verdict.reason),
        key=lambda verdict: -verdict.slowdown,
    )
    lines = []
    for verdict in slower[:_NOTED]:
        lines += page.paragraph(f"healthy {verdict.node}: {verdict.reason}")
    rest = nodes_text(sorted(verdict.node for verdict in slower[_NOTED:]))
    if rest:
        lines += page.paragraph(f"healthy {rest}: not slower than these, but than most")
    return lines


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
    "leave": "nodes are to be left",
}


def _timeline(runs: Sequence[RunReport], page: Page, *, verbose: bool) -> list[str]:
    """Return the timeline of every check, rounds included, if there is anything to tell."""
    if not (verbose or any(map(_is_eventful, runs))):
        return []
    rows = [["TIMELINE", "SECONDS", "EVENT"]]
    for run in runs:
        label = attempt_text(run)
        for after_s, text in events_of(run, whole=verbose):
            rows.append([label, f"{after_s:.1f}", text])
            label = ""
    return page.table(rows, align=("left", "right")) if len(rows) > 1 else []


def events_of(run: RunReport, *, whole: bool = False) -> list[tuple[float, str]]:
    """Return what happened in a check and when, rounds included; of these all groups if `whole`."""
    events = [(event.after_s, _event(event, run)) for event in run.timeline]
    events += [
        (each.after_s, details.round_text(run, each, whole=whole)) for each in run.each_round
    ]
    return sorted(events, key=lambda event: event[0])


def _is_eventful(run: RunReport) -> bool:
    """Tell whether a check led to more than that the job went on."""
    ill = any(node.level not in (Level.HEALTHY, None) for node in run.nodes)
    return acted(run.timeline) or ill or bool(run.paths or run.leaves or run.post_mortem)


def _event(event: Event, run: RunReport) -> str:
    nodes, verb = nodes_text(event.nodes), verb_of(event.action)
    match event.what:
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
            return _script_event(event, run)


def _script_event(event: Event, run: RunReport) -> str:
    match event.what:
        case "diagnosed":
            return f"post-mortem: {event.detail}"
        case "hang_found":
            return f"the training hangs: {event.detail}"
        case "hang_over":
            return f"the training goes on: {event.detail}"
        case "slowdown_found":
            return f"steps take longer: {event.detail}"
        case "straggler_found":
            return f"{event.detail}, on {nodes_text(event.nodes)}"
        case "script_started":
            on = f" on {nodes_text(event.nodes)}" if event.nodes else ""
            again = f" again{on}" if event.action else ""
            return f"{(run.script.name if run.script else '') or 'the script'} started{again}"
        case "failure_planned":
            plan, _, reason = event.detail.partition(": ")
            return f"{_PLANS.get(plan, plan)}: {reason}"
        case _:
            return f"the script ended, {event.detail}"
