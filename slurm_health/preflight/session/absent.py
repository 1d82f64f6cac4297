# SPDX-License-Identifier: Apache-2.0
"""Which nodes take part in the rounds of a check, and what is said of those that do not. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from slurm_health.preflight.session.conclusion import Absence, unmeasured
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.round_state import NodeState
from slurm_health.preflight.session.run_state import RunState
from slurm_health.records.text import counted
from slurm_health.records.verdict import NodeVerdict


def comparable(agents: Mapping[str, NodeState]) -> list[str]:
    """Return the usable nodes that are equipped as most are.

    Each rank of a collective must expect the same ranks and speak the same protocol.
    """
    stacks = {name: _stack(node) for name, node in agents.items() if node.usable}
    if not stacks:
        return []
    common, _ = Counter(stacks.values()).most_common(1)[0]
    return [name for name, stack in stacks.items() if stack == common]


def without_torch(state: RunState) -> str:
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


def judged(state: RunState, limits: TimeLimits) -> dict[str, NodeVerdict]:
    """Judge the nodes the Localizer never saw, and those whose devices failed since."""
    agents = state.agents
    device_failures = _device_failures(state)
    admitted = frozenset(state.admitted or ())
    compared = {_stack(agents[name]) for name in admitted}
    others_started = bool(admitted) or any(node.started for node in agents.values())
    return {
        name: unmeasured(
            name,
            Absence(
                could_not_start=node.failed_starts >= limits.failed_starts_per_node,
                others_started=others_started,
                lost=node.lost,
                failed=node.failed,
                device_failed=device_failures.get(name, ""),
                started=node.started is not None,
                stack=_stack(node) if node.usable and _stack(node) not in compared else "",
                common_stack=", ".join(sorted(compared)),
            ),
        )
        for name, node in agents.items()
        if name in device_failures or name not in admitted
    }


def _device_failures(state: RunState) -> dict[str, str]:
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
        name: each.words
        for name, each in failures.items()
        if each.torch in loaded
        and not (each.late and some_keep and not agents[name].driver_keeps_state)
    }


def _stack(node: NodeState) -> str:
    """Return what a node's workers run and on how much, empty where they are not ready."""
    if (ready := node.ready) is None:
        return ""
    devices = counted(len(ready.devices), "device")
    if ready.light:
        return f"light probes on {devices}"
    return f"torch {ready.torch} with {ready.collective_library or ready.backend} on {devices}"
