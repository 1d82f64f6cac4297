# SPDX-License-Identifier: Apache-2.0
"""Which nodes take part in the rounds of a check, and the verdict on those that do not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.state import CheckState, NodeState
from slurm_health.records.text import counted
from slurm_health.records.verdict import Level, NodeVerdict


def comparable(agents: Mapping[str, NodeState]) -> list[str]:
    """Return the usable nodes that are equipped as most are.

    Each rank of a collective must expect the same ranks and speak the same protocol.
    """
    stacks = {name: _stack(node) for name, node in agents.items() if node.usable}
    if not stacks:
        return []
    common, _ = Counter(stacks.values()).most_common(1)[0]
    return [name for name, stack in stacks.items() if stack == common]


def without_torch(state: CheckState) -> str:
    """Return why light probes are to measure all nodes instead: some have no torch, others may.

    Empty once anything is measured. Where others have accelerators and torch, these are worth more
    than the nodes that are not measured then: their verdicts say so.
    """
    agents = state.agents
    lacking = [name for name, node in agents.items() if node.no_torch]
    if not lacking or state.light or state.admitted is not None:
        return ""
    others = any(node.usable or node.pending for node in agents.values())
    if others and any(agents[name].accelerators for name in lacking):
        return ""
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"{lacking[0]}{more}: {agents[lacking[0]].failed}"


def judged(state: CheckState, limits: TimeLimits) -> dict[str, NodeVerdict]:
    """Judge the nodes that took part in no round, and those whose devices failed since.

    Two things are the node's own fault: Slurm could repeatedly not start a step there while it
    could elsewhere, and its devices repeatedly failed with a torch that can use those of most
    others. Everything else may be ours, the job's or the interpreter's.
    """
    agents = state.agents
    device_failures = _device_failures(state)
    admitted = frozenset(state.admitted or ())
    apart = {n: node for n, node in agents.items() if n not in admitted or n in device_failures}
    compared = {_stack(agents[name]) for name in admitted} if apart else set()
    others_started = bool(admitted) or any(node.started for node in agents.values())
    verdicts = {}
    for name, node in apart.items():
        fault = component = ""
        stack = _stack(node)
        if node.failed_starts >= limits.failed_starts_per_node and others_started:
            fault, component = f"Slurm cannot start a step there: {node.lost}", "slurmd"
        elif name in device_failures:
            fault, component = f"{device_failures[name]}; most nodes can use theirs", "device"
        elif node.failed:
            reason = f"could not be measured: {node.failed}"
        elif node.usable and stack not in compared:
            others = f" ({', '.join(sorted(compared))})" if compared else ""
            reason = f"not compared: {stack} there, unlike the other nodes{others}"
        elif node.lost:
            reason = f"could not be measured: {node.lost}"
        elif node.started:
            reason = "could not be measured: its check processes were not ready in time"
        else:
            reason = "could not be measured: its agent never reported"
        verdicts[name] = (
            NodeVerdict(
                node=name, level=Level.FAULTY, component=component, reason=fault, evidence=(fault,)
            )
            if fault
            else NodeVerdict(node=name, level=Level.INCONCLUSIVE, probability=0.0, reason=reason)
        )
    return verdicts


def _device_failures(state: CheckState) -> dict[str, str]:
    """Return what devices did that others do not, where most nodes can use theirs."""
    agents = state.agents
    failures = {name: node.device_failure for name, node in agents.items() if node.device_failure}
    well = [name for name in state.admitted or () if name not in failures]
    if 2 * len(well) <= len(agents):
        return {}
    loaded = {ready.torch for name in well if (ready := agents[name].ready)}
    # A driver that unloads between processes initialises each device anew, for seconds.
    some_keep = any(agents[name].driver_keeps_state for name in well)
    return {
        name: failure.words
        for name, failure in failures.items()
        if failure.torch in loaded
        and not (failure.late and some_keep and not agents[name].driver_keeps_state)
    }


def _stack(node: NodeState) -> str:
    """Return what a node's workers run and on how much, empty where they are not ready."""
    if (ready := node.ready) is None:
        return ""
    devices = counted(len(ready.devices), "device")
    if ready.light:
        return f"light probes on {devices}"
    return f"torch {ready.torch} with {ready.collective_library or ready.backend} on {devices}"
