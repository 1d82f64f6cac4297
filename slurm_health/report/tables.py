# SPDX-License-Identifier: Apache-2.0
"""The tables of a report, the same for text and HTML: worst first."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from slurm_health.records.probe_catalog import ALLGATHER, MATMUL, unit_of
from slurm_health.records.text import NOTHING, listed
from slurm_health.records.verdict import Level
from slurm_health.report import sentences, summary
from slurm_health.report.layout import Tinted, moment_text, range_text
from slurm_health.report.story import WORST_FIRST, Node, Run, Story

_ALWAYS_SHOWN = (ALLGATHER, MATMUL)
_PER_TFLOP = 1000.0
_NODES = 3  # bad nodes whose evidence is shown
_LINES = 3  # of their evidence, the latest
_ROWS = 10  # of nodes, before those of a level share one
_SLOWER = 1.05  # times slower than its peers a healthy node is worth a row
_EVENTS = 30  # of a timeline, the latest
_DEVICE = re.compile(r"\b(?:device|rail) (\d+)")

Cell = str | Tinted


class Table(NamedTuple):
    """One table. The first row has the heads; the last column is prose."""

    name: str
    rows: list[list[Cell]]
    align: tuple[str, ...] = ()


def title_of(story: Story) -> list[str]:
    """Return the phrases of the first line: the job, its script, where and when."""
    started = [run.started for run in story.runs if run.started]
    array = started and started[-1].array == story.job
    number = f" ({started[-1].job_id})" if array else ""
    place = "/".join(filter(None, (story.cluster, story.partition)))
    began_s = story.runs[0].started_s
    began = moment_text(began_s) if began_s else ""
    nodes = sentences.nodes_text([node.node for node in story.last.nodes])
    phrases = [f"Job {story.job}{number}", story.script, place, began, nodes]
    return [phrase for phrase in phrases if phrase]


def tables_of(story: Story, *, verbose: bool = False) -> Iterator[Table]:
    """Yield the tables below the summary that have anything to show."""
    yield attempts_table(story)
    if any(node.is_bad or node.figures for node in story.nodes):
        yield nodes_table(story.nodes, verbose=verbose)
    yield _evidence(story, verbose=verbose)
    yield _timeline(story, verbose=verbose)
    now: list[list[Cell]] = [["NOW", "STATE", "WHY, BY WHOM AND SINCE WHEN"]]
    now += [[n.node, n.state, n.reason or "no reason given"] for n in story.out_of_use]
    yield Table("now", now)


def summary_rows(story: Story, *, followed: bool = False) -> list[list[Cell]]:
    """Return the summary: a word, and a sentence with the colour of its severity."""
    short = summary.summary_of(story, followed=followed)
    findings = [
        (short.outcome, short.headline),
        *(("found", finding) for finding in short.findings),
    ]
    cells: list[tuple[str, Cell]] = [
        *((word, Tinted(f.text, f.severity, len(f.what))) for word, f in findings),
        *(("done", text) for text in short.done),
        *(("next", text) for text in short.next),
    ]
    words = ["", *(word for word, _ in cells)]
    return [
        ["" if word == before else word.upper(), cell]
        for before, (word, cell) in zip(words, cells, strict=False)
    ]


def attempts_table(story: Story) -> Table:
    """Return one line per check; of a single one all is in the summary."""
    rows: list[list[Cell]] = [["ATTEMPT", "CHECK", "THEN"]]
    for run in story.runs if len(story.runs) > 1 else ():
        nodes = sentences.nodes_text([node.node for node in run.nodes])
        later = f", check {run.check}" if run.check > 1 else ""
        check = ": ".join(filter(None, (sentences.effort_text(run), sentences.levels_text(run))))
        alone = Story(job=story.job, cluster="", script=story.script, runs=(run,), nodes=run.nodes)
        script = sentences.script_text(run.script) if run.script else ""
        then = [*summary.acts_texts(alone), run.requeued or script]
        number = f"{run.attempt + 1}{later}: {nodes}"
        rows.append([number, check, "; ".join(filter(None, then))])
    return Table("attempts", rows)


def nodes_table(nodes: Sequence[Node], *, verbose: bool = False) -> Table:
    """Return the nodes, worst first; those with the same level and reason share a row.

    The healthy share one, but for those that are slower than most. Unless `verbose`, so do those
    of a level that has too many.
    """
    groups: list[tuple[Level | None, str, list[Node]]] = []
    for level in WORST_FIRST:
        by_reason: dict[str, list[Node]] = {}
        for node in nodes:
            if node.level is level:
                # A job waits for its slower nodes, so these are worth a row though healthy.
                alike = level in (Level.HEALTHY, None) and (node.slowdown or 0) < _SLOWER
                reason = "" if alike and not verbose else node.reason
                by_reason.setdefault(reason, []).append(node)
        if len(by_reason) > _ROWS and not verbose:
            rows = list(by_reason.items())
            rest = [node for _, same in rows[_ROWS - 1 :] for node in same]
            by_reason = {**dict(rows[: _ROWS - 1]), "--verbose shows why": rest}
        groups += [(level, reason, same) for reason, same in by_reason.items()]
    reasons = " ".join(reason for level, reason, _ in groups if level not in (Level.HEALTHY, None))
    keys = {sentences.figure_key(probe): probe for probe in _ALWAYS_SHOWN}
    for key in sorted({key for node in nodes for key in node.figures} - {*keys}):
        probe = key.rpartition("_gb_per_s")[0] or key.rpartition("_gflop")[0] or key[: -len("_ms")]
        if probe.partition("_")[0] in reasons:
            keys[key] = probe
    name = listed if verbose else sentences.nodes_text
    verdicts: list[Cell] = []
    for level, _, _ in groups:
        word = "undecided" if level is Level.INCONCLUSIVE else level.value if level else NOTHING
        verdicts.append(Tinted(word, sentences.SEVERITIES[level], len(word)) if level else word)
    columns: list[list[Cell]] = [
        ["NODES", *(name([node.node for node in same]) for _, _, same in groups)],
        ["VERDICT", *verdicts],
        *(_figures(key, probe, [same for _, _, same in groups]) for key, probe in keys.items()),
        ["REASON", *(reason for _, reason, _ in groups)],
    ]
    return Table("nodes", [list(row) for row in zip(*columns, strict=True)])


def _figures(key: str, probe: str, groups: Sequence[Sequence[Node]]) -> list[Cell]:
    values = [[v for node in same for v in node.figures.get(key, ())] for same in groups]
    unit = unit_of(probe)
    if probe == MATMUL and any(value >= _PER_TFLOP for group in values for value in group):
        unit, values = "TFLOP/s", [[value / _PER_TFLOP for value in group] for group in values]
    return [f"{probe.upper()} {unit}", *map(range_text, values)]


def _evidence(story: Story, *, verbose: bool) -> Table:
    """Return the evidence behind the findings: of the script, the nodes and the links."""
    rows: list[list[Cell]] = [["EVIDENCE", "", ""]]

    def add(subject: str, facts: Sequence[tuple[str, str]], above: Collection[str] = ()) -> None:
        """Append facts but for those that stand `above`, in the summary."""
        title_before = None
        for title, text in facts:
            if title not in above:
                rows.append([subject, "" if title == title_before else title, text])
                subject, title_before = "", title

    for run in story.runs if verbose else (story.training,):
        which = sentences.attempt_text(run.attempt, run.check) if len(story.runs) > 1 else "script"
        if run.post_mortem:
            above = {"advice"} if verbose else {"advice", "first"}
            if sentences.cause_text(run.post_mortem) == run.post_mortem.description and not verbose:
                above |= {"cause"}
            add(which, sentences.lines_of(run.post_mortem, verbose=verbose), above)
        for event in run.events:
            if event.diagnosed:
                above = {"advice"} if verbose else {"advice", "cause"}
                facts = sentences.lines_of(event.diagnosed, verbose=verbose)
                add(event.event.value, facts, above)
    bad = sorted((n for n in story.nodes if n.is_bad), key=lambda n: WORST_FIRST.index(n.level))
    for node in bad if verbose else bad[:_NODES]:
        add(node.node, _node_facts(node, verbose=verbose))
    for link in (*story.paths, *story.leaves)[: None if verbose else _NODES]:
        add(NOTHING.join(link.ends), _tests(link.evidence, verbose=verbose))
    if verbose:
        floors = {metric: floor for run in story.runs for metric, floor in run.floors.items()}
        limits = {
            metric: f"slow if it takes {100 * floor:.0f} % longer"
            if floor <= 1
            else "its values differ too much to tell"
            for metric, floor in floors.items()
        }
        add("limits", list(limits.items()))
    elif bad[_NODES:]:
        add(f"and {len(bad) - _NODES} more", [("", "--verbose shows all")])
    return Table("evidence", rows)


def _node_facts(node: Node, *, verbose: bool) -> list[tuple[str, str]]:
    devices = node.hardware.devices if node.hardware else ()
    number = _DEVICE.search(node.component)
    names = []
    if number and int(number[1]) < len(devices):
        device = devices[int(number[1])]
        at = f" at {device.pci_address}" if device.pci_address else ""
        names.append(f"GPU {device.index} {device.uuid}{at}")
    if node.hardware and "network" in node.component and not names:
        names += [f"interface {node.hardware.interface}"] if node.hardware.interface else []
    elif node.hardware and node.hardware.model:
        names.append(node.hardware.model)
    slower = node.slowdown is not None and node.slowdown > 1
    times = f", {node.slowdown:.2f} times slower than its peers" if slower else ""
    named = f" ({', '.join(names)})" if names else ""
    part = node.component if node.component != "node" or named else ""
    facts = [("part", f"{part}{named}{times}")] if part or times else []
    facts += [("device", note) for device in devices for note in device.notes]
    return [*facts, *_tests(node.evidence, verbose=verbose)]


def _tests(evidence: Sequence[str], *, verbose: bool) -> list[tuple[str, str]]:
    shown = evidence if verbose else evidence[-_LINES:]
    more = len(evidence) - len(shown)
    facts = [("tests", line) for line in shown]
    return [*facts, *([("tests", f"and {more} more: --verbose shows all")] if more else [])]


def _timeline(story: Story, *, verbose: bool) -> Table:
    """Return the events by attempt; if `verbose`, with rounds, and of healthy attempts too."""
    rows: list[list[Cell]] = [["TIMELINE", "SECONDS", "EVENT"]]
    for attempt in dict.fromkeys(run.attempt for run in story.runs):
        checks = [run for run in story.runs if run.attempt == attempt]
        acts = [act for run in checks for act in run.actions if act.action != "proceed"]
        restarts = any(run.script and run.script.restarts for run in checks)
        if not (
            verbose or acts or restarts or any(node.is_bad for run in checks for node in run.nodes)
        ):
            continue
        start_s = checks[0].started_s or 0.0
        events = []
        for run in checks:
            later_s = (run.started_s or start_s) - start_s
            which = f"check {run.check}: " if run.check > 1 else ""
            for after_s, text in events_of(run, verbose=verbose):
                events.append((later_s + after_s, f"{which}{text}"))
        events.sort(key=lambda event: event[0])
        label = f"attempt {attempt + 1}"
        for after_s, text in events if verbose else events[-_EVENTS:]:
            rows.append([label, f"{after_s:.1f}", text])
            label = ""
    return Table("timeline", rows, ("left", "right"))


def events_of(run: Run, *, verbose: bool) -> Iterator[tuple[float, str]]:
    """Yield the events of a check and their times; in short without rounds and echoes of acts."""
    done = {event.action for event in run.timeline if event.event == "action_done"}
    for event in run.timeline:
        echo = event.event in ("action_intended", "job_outcome") and event.action in done
        if echo and not verbose:
            continue
        yield event.after_s, event.text
    for measured in run.rounds if verbose else ():
        yield measured.after_s, sentences.round_text(measured)
