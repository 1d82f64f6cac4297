# SPDX-License-Identifier: Apache-2.0
"""What stands behind the verdicts: evidence, rounds, every sample, and what counted as slow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_health.preflight.localize.settings import USUAL, DeviceKind
from slurm_health.records.probe_catalog import ALLGATHER, MATMUL
from slurm_health.records.text import counted, elapsed_text
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.layout import NOTHING, Page, number_text
from slurm_health.report.model import JobReport, NodeReport, RunReport
from slurm_health.report.phrases import WORST_FIRST, nodes_text
from slurm_health.report.rounds import DeviceReport, GroupReport, Hardware, RoundReport

_NODES = 12  # that are not well and are told of one by one
_LINES = 6  # of evidence for each, the latest
_GROUPS = 6  # of a round that did not go well and are named
_DEVICE = re.compile(r"\b(?:device|rail) (\d+)")
_NO_PART = "node"  # the node as a whole, which its verdict has named
_OUTCOMES = {
    Outcome.MEASURED: "measured",
    Outcome.FAILED: "failed",
    Outcome.TIMED_OUT: "timed out",
    Outcome.NOT_RUN: "not run",
    None: "no word yet",
}
_SETTINGS = {ALLGATHER: "network_floor", MATMUL: "compute_floor"}


def unwell(report: JobReport, page: Page, *, whole: bool) -> list[str]:
    """Return what was measured on each node and path that is not well, and the part at fault.

    Args:
        report: the job.
        page: where it is shown.
        whole: tell all of all such nodes.
    """
    bad = [
        node
        for level in WORST_FIRST
        for node in report.nodes
        if node.level is level and level not in (Level.HEALTHY, None)
    ]
    told = bad if whole else bad[:_NODES]
    rows = [["EVIDENCE", "", ""]]
    runs = {run.label: run for run in report.runs}
    for node in told:
        assert node.verdict is not None
        name = node.node
        for title, text in _facts(node, node.verdict, runs[node.label], whole=whole):
            rows.append([name, title, text])
            name = ""
    for link in (*report.paths, *report.leaves)[: None if whole else _NODES]:
        name = NOTHING.join(link.ends)
        for title, text in _tests(link.evidence, whole=whole):
            rows.append([name, title, text])
            name = ""
    if len(rows) == 1:
        return []
    lines = page.table(rows)
    rest = nodes_text(node.node for node in bad[len(told) :])
    return [*lines, *(page.paragraph(f"and {rest}: --verbose shows all") if rest else [])]


def limits(node: NodeReport, run: RunReport) -> list[str]:
    """Return the limits in which a slow node was measured, where the journal names them."""
    reason = node.verdict.reason if node.verdict and node.level is Level.SLOW else ""
    probes = dict.fromkeys(re.split(r" on |:", name)[0] for name in run.floors)
    return [f"{probe}: {limit_of(run, probe).text()}" for probe in probes if probe in reason]


def _facts(
    node: NodeReport, verdict: NodeVerdict, run: RunReport, *, whole: bool
) -> list[tuple[str, str]]:
    times = f", {verdict.slowdown:.2f} times slower than its peers" if verdict.slowdown > 1 else ""
    part = f"{part_text(node)}{times}"
    facts = [("part", part)] if part != _NO_PART else []
    facts += [("limit", text) for text in limits(node, run)]
    facts += _tests(verdict.evidence, whole=whole)
    for device in node.hardware.devices if node.hardware else ():
        facts += [("device", said) for said in device.said]
    return facts


def _tests(evidence: Sequence[str], *, whole: bool) -> list[tuple[str, str]]:
    """Return the latest tests that stand behind a verdict."""
    lines = evidence if whole else evidence[-_LINES:]
    facts = [("" if number else "tests", line) for number, line in enumerate(lines)]
    left_out = len(evidence) - len(lines)
    return [*facts, *([("", f"and {left_out} more: --verbose shows all")] if left_out else [])]


def part_text(node: NodeReport) -> str:
    """Return the part of a node that its verdict is about, with the names that it goes by."""
    assert node.verdict is not None
    part, parts = node.verdict.component, node.hardware
    device = _device(node.verdict, parts)
    names = []
    if device is not None:
        at = f" at {device.pci_address}" if device.pci_address else ""
        names.append(f"GPU {device.index} {device.uuid}{at}")
    if parts and "network" in part and device is None:
        names += [f"interface {parts.interface}"] if parts.interface else []
    elif parts and parts.model:
        names.append(parts.model)
    return f"{part} ({', '.join(names)})" if names else part


def _device(verdict: NodeVerdict, hardware: Hardware | None) -> DeviceReport | None:
    """Return the GPU that a verdict names by its place among those of the job."""
    found = _DEVICE.search(verdict.component) or _DEVICE.search(verdict.reason)
    if found is None or hardware is None or int(found[1]) >= len(hardware.devices):
        return None
    return hardware.devices[int(found[1])]


def round_text(run: RunReport, each: RoundReport, *, whole: bool) -> str:
    """Return one round: who was measured with whom, how that ended, and how long each node took.

    Groups in which all went well share one phrase, unless `whole`; the others are named.
    """
    ill = {node.node for node in run.nodes if node.level not in (Level.HEALTHY, None)}
    named = [
        group
        for group in each.groups
        if whole or group.outcome is not Outcome.MEASURED or ill & set(group.nodes)
    ]
    told = named if whole else named[:_GROUPS]
    texts = [_group_text(group) for group in told]
    if len(named) > len(told):
        texts.append(f"{len(named) - len(told)} more like these")
    others = [] if whole else _without(each.groups, named)
    if others:
        texts.append(_others_text(others, also=bool(named)))
    elapsed_s = {
        node: seconds
        for group in each.groups
        for node, seconds in zip(group.nodes, group.elapsed_s, strict=True)
        if seconds is not None
    }
    if elapsed_s:
        texts.append(elapsed_text(elapsed_s))
    took = "" if each.duration_s is None else f", {each.duration_s:.1f} s"
    phase = f", {each.phase}" if each.phase else ""
    return f"round {each.round}{phase}{took}: {'; '.join(texts)}"


def _without(groups: Sequence[GroupReport], named: Sequence[GroupReport]) -> list[GroupReport]:
    left_out = {group.nodes for group in named}
    return [group for group in groups if group.nodes not in left_out]


def _group_text(group: GroupReport) -> str:
    """Return one group: `n3+n4 timed out (no answer from n4)`."""
    if len(group.nodes) == 1 and group.outcome is Outcome.MEASURED:
        return f"{group.nodes[0]} alone"
    silent = f" (no answer from {nodes_text(group.silent)})" if group.silent else ""
    return f"{'+'.join(group.nodes)} {_OUTCOMES[group.outcome]}{silent}"


def _others_text(groups: Sequence[GroupReport], *, also: bool) -> str:
    alone = all(len(group.nodes) == 1 for group in groups)
    pairs = all(len(group.nodes) == 2 for group in groups)
    what = "node" if alone else "pair" if pairs else "group"
    count = counted(len(groups), f"{'other ' if also else ''}{what}")
    return f"{count} measured{' alone' if alone else ''}"


def samples(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return every sample as it was recorded: the time of each iteration, rank by rank."""
    rows = [["SAMPLES", "ROUND", "PROBE", "RANK", "WITH", "MS OF EACH ITERATION, AND FIGURES"]]
    for run in runs:
        for sample in sorted(run.samples, key=lambda each: (each.round, each.node)):
            others = ", ".join(name for name in sample.group if name != sample.node)
            figures = [f"{name} {value}" for name, value in sample.figures.items()]
            ranks = sample.iteration_ms or [[]]
            for rank, times_ms in enumerate(ranks):
                told = [*map(number_text, times_ms), *(figures if rank == 0 else [])]
                if told:
                    where = f"{run.label}/{sample.round}"
                    row = [sample.node, where, str(sample.metric), str(rank), others or NOTHING]
                    rows.append([*row, " ".join(told)])
    return page.table(rows) if len(rows) > 1 else []


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The smallest relative slowdown that made a node slow, and the least it could have been."""

    floor: float
    least: float

    @property
    def raised(self) -> bool:
        """Tell whether devices that are well differed so much that the limit was raised."""
        return self.floor > self.least * 1.005  # the journal rounds it

    def text(self) -> str:
        """Return it as the end of a sentence."""
        why = f", raised from {100 * self.least:.0f} %: the devices here differ that much"
        return f"slow if it takes {100 * self.floor:.0f} % longer{why if self.raised else ''}"


def limit_of(run: RunReport, probe: str) -> Limit:
    """Return the limit of a probe: what the verdict names, else what the check was told."""
    name = _SETTINGS.get(probe, "compute_floor")
    usual = USUAL[_kind_of_device(run)]
    chosen = run.started.settings.get(name) if run.started else None
    least = _number(chosen)
    if least is None:
        least = usual.network_floor if name == "network_floor" else usual.compute_floor
    recorded = [
        floor
        for metric, floor in run.floors.items()
        if metric == probe or metric.startswith((f"{probe} on ", f"{probe}:"))
    ]
    return Limit(floor=max(recorded, default=least), least=least)


def _number(value: object) -> float | None:
    """Return a setting as it was recorded, None where it is no number."""
    try:
        return float(str(value))
    except ValueError:
        return None


def _kind_of_device(run: RunReport) -> DeviceKind:
    """Return what a check's nodes computed with: only accelerators have names of their own."""
    watched = any(node.hardware and node.hardware.devices for node in run.nodes)
    models = {node.hardware.model for node in run.nodes if node.hardware}
    cpu = any("thread" in model for model in models)
    return DeviceKind.ACCELERATOR if watched or not cpu else DeviceKind.CPU
