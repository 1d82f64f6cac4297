# SPDX-License-Identifier: Apache-2.0
"""A check in which no two nodes exchanged data: one finding about all of them, and what to do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slurm_health.records.verdict import Level, Outcome
from slurm_health.report.model import JobReport, RunReport
from slurm_health.report.phrases import nodes_text

_FAILED = (Outcome.FAILED, Outcome.TIMED_OUT)


@dataclass(frozen=True, kw_only=True)
class NoExchange:
    """The nodes of which no two exchanged data, over which interfaces, and why not."""

    nodes: tuple[str, ...]
    interfaces: tuple[str, ...]
    why: str

    @property
    def found(self) -> str:
        """Return what was found, in one sentence."""
        over = f" over {', '.join(self.interfaces)}" if self.interfaces else ""
        why = f": {self.why}" if self.why else ""
        if len(self.nodes) == 2:
            both = " and ".join(self.nodes)
            return (
                f"{both} cannot exchange data{over}{why}; nothing tells which of them is at fault"
            )
        return f"no two of {nodes_text(self.nodes)} can exchange data{over}{why}"

    def advice(self, job: str, *, runs: bool) -> str:
        """Return what to look at, and the options that keep a script off such nodes."""
        names = "NCCL_SOCKET_IFNAME, without GPUs GLOO_SOCKET_IFNAME, names another"
        steps = [f"look at the interface ({names}) and at firewalls between the nodes"]
        if runs:
            steps.append(f"a script that needs them together will hang: scancel {job} ends it")
        if len(self.nodes) == 2:
            steps.append("with --spares=1 a third node tells which of two is at fault")
        steps.append("with --on-inconclusive=hold, or requeue, a job does not start on such nodes")
        return "; ".join(steps)


def likelier(report: JobReport) -> dict[str, str]:
    """Return, of two nodes that could not exchange data, the one that is likelier to be why.

    The other one was found healthy, with another partner, by a later check of the same job. Nothing
    says so of a node that a later check has judged itself.

    Returns:
        What makes it the likelier one, by node.
    """
    found = {}
    for place, run in enumerate(report.runs):
        apart, later = no_exchange(run), report.runs[place + 1 :]
        if apart is None or len(apart.nodes) != 2:
            continue
        levels = {node.node: node.level for each in later if each.judged for node in each.nodes}
        known = [node for node in apart.nodes if node in levels]
        if len(known) == 1 and levels[known[0]] is Level.HEALTHY:
            (other,) = {*apart.nodes} - {*known}
            found[other] = (
                f"cannot exchange data with {known[0]}, which can with other nodes: it is the"
                " likelier of the two to be at fault, but that is not proven"
            )
    return found


def no_exchange(run: RunReport) -> NoExchange | None:
    """Return what stands behind nodes that are all undecided, None where it is something else."""
    if not run.judged or len(run.nodes) < 2:
        return None
    if any(node.level is not Level.INCONCLUSIVE for node in run.nodes):
        return None
    met = [group for each in run.each_round for group in each.groups if len(group.nodes) > 1]
    if not met or any(group.outcome not in _FAILED for group in met):
        return None
    if {node for group in met for node in group.nodes} != {node.node for node in run.nodes}:
        return None
    used = (node.hardware.interface for node in run.nodes if node.hardware)
    said = Counter(
        text.removeprefix(f"{node}: ")
        for group in met
        for node in group.nodes
        for text in group.details
        if text.startswith(f"{node}: ")
    )
    return NoExchange(
        nodes=tuple(node.node for node in run.nodes),
        interfaces=tuple(dict.fromkeys(name for name in used if name)),
        why=said.most_common(1)[0][0] if said else "",
    )
