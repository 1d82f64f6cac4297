# SPDX-License-Identifier: Apache-2.0
"""What is said of ranks while a training hangs: who, where, and what shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_health.records.text import listed, ranks_text
from slurm_health.training.diagnosis.seen import BrokenPath, RankSeen, StackPlace


def shared_end(paths: Sequence[BrokenPath]) -> tuple[tuple[str, ...], str]:
    """Return the nodes of the broken paths, and what they tell: one node, where all lead to it."""
    ends = [{each.node, each.peer} for each in paths]
    if not ends:
        return (), ""
    shared = set.intersection(*ends)
    everyone = tuple(sorted(set.union(*ends)))
    if len(shared) == 1 and len(everyone) > 2:
        (node,) = shared
        return (node,), f"every broken connection leads to {node}"
    return everyone, "connections retransmit and get no answer"


def broken_line(path: BrokenPath) -> str:
    """Return what connections show of a path."""
    return (
        f"{path.node} gets no answer from {path.peer}: {path.connections} connections, up to"
        f" {path.retransmits} retransmissions"
    )


def gone_line(gone: RankSeen) -> str:
    """Return what is known of a rank that has ended."""
    if not gone.pid:
        return f"rank {gone.rank} has no process, and had none when the monitor began"
    return (
        f"process {gone.pid} of rank {gone.rank} on {gone.node} is gone; its last step was"
        f" {gone.step}"
    )


def where_line(seen: RankSeen, place: StackPlace) -> str:
    """Return where a rank is: its line, what it does, its process's state."""
    what = f" {place.what}" if place.what else ""
    at = f" at {place.at}" if place.at else ""
    state = f", state {seen.state}" if seen.state else ""
    kernel = f", {seen.kernel}" if seen.kernel else ""
    return f"rank {seen.rank} on {seen.node}{at}: {place.doing.value}{what}{state}{kernel}"


def ranks_of(seen: Iterable[RankSeen]) -> tuple[int, ...]:
    """Return their numbers, in order."""
    return tuple(sorted(each.rank for each in seen))


def nodes_of(seen: Iterable[RankSeen]) -> tuple[str, ...]:
    """Return their nodes that are known, in order."""
    return tuple(sorted({each.node for each in seen if each.node}))


def who(seen: Sequence[RankSeen]) -> str:
    """Return ranks and nodes."""
    nodes = nodes_of(seen)
    return ranks_text(ranks_of(seen)) + (f" on {listed(nodes)}" if nodes else "")


def have(seen: Sequence[RankSeen]) -> str:
    """Return the verb that goes with them."""
    return "has" if len(seen) == 1 else "have"
