# SPDX-License-Identifier: Apache-2.0
"""What a storm has left behind."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.storms.cluster import Cluster
from benchmarks.storms.runners import LOG, TIMES
from tests.lab.errors import DeadlinePassed
from tests.lab.records import parse_record

# What hooks send slurmctld. The storm itself asks only for jobs and statistics until these are
# counted; slurmd and srun send none of them.
HOOKS_SEND = frozenset(
    {
        "REQUEST_BUILD_INFO",
        "REQUEST_NODE_INFO",
        "REQUEST_NODE_INFO_SINGLE",
        "REQUEST_PARTITION_INFO",
        "REQUEST_TOPO_INFO",
        "REQUEST_UPDATE_NODE",
    }
)
_RPC = re.compile(r"^\s+([A-Z_]+)\s*\(\s*\d+\) count:(\d+)", re.MULTILINE)
_WELL = {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a hook."""

    hook: str
    node: str
    at_s: float
    wall_s: float
    cpu_s: float
    code: int


@dataclass(kw_only=True)
class Seen:
    """All of it.

    Args:
        messages: what hooks sent to slurmctld, by type.
        drained: node to reason, when the storm was over and before anything was mended.
        broken_in_pool: the nodes that were broken then and not drained.
        tripped: the partitions and switches whose breaker had tripped then.
        found_by: of each node that was drained, or refused to be, whose job found it; -1: no job.
        trip_took_s: from the start of the hook that tripped it to what others could read.
        ran: the runs of prologs and health checks.
        submitted: the jobs that Slurm took.
        ended: state of each job that Slurm knows, and its reason, at the very end.
        restarted: how many jobs ran more than once.
        still_out: nodes that were not back at the very end, and how they were.
        normal_s: from the mending until all was normal.
        said: the last words of hooks, of nodes with something wrong.
    """

    messages: dict[str, int] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    broken_in_pool: list[str] = field(default_factory=list)
    tripped: list[str] = field(default_factory=list)
    found_by: dict[str, int] = field(default_factory=dict)
    trip_took_s: dict[str, float] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)
    submitted: set[int] = field(default_factory=set)
    ended: dict[int, tuple[str, str]] = field(default_factory=dict)
    restarted: int = 0
    still_out: dict[str, str] = field(default_factory=dict)
    normal_s: float = 0.0
    said: dict[str, str] = field(default_factory=dict)


def look_at_storm(cluster: Cluster, seen: Seen, broken: Sequence[str]) -> None:
    """See what the storm itself has done, before anything is mended."""
    text = cluster.lab.run(["sdiag"], check=False, deadline_s=120).stdout
    counted = {name: int(count) for name, count in _RPC.findall(text)}
    seen.messages = {name: count for name, count in counted.items() if name in HOOKS_SEND}
    for name, record in cluster.lab.node_states().items():
        if "DRAIN" in record["State"] or "DOWN" in record["State"]:
            seen.drained[name] = record.get("Reason", "") or record["State"]
    seen.broken_in_pool = [node for node in broken if node not in seen.drained]
    ledger = cluster.ledger()
    if ledger:
        seen.tripped = sorted(ledger.trips)
        seen.found_by = {each.node: each.uid for each in (*ledger.refused, *ledger.entries)}


def await_normal(cluster: Cluster, seen: Seen, deadline_s: float) -> None:
    """Wait until all jobs have ended and all nodes are back; see how it is then."""
    began_s = time.monotonic()

    def wrong() -> str:
        waiting = cluster.lab.ask("squeue", "-ho", "%A %T %r", check=False, deadline_s=120)
        out = _out(cluster)
        return waiting.stdout + " ".join(out)

    with contextlib.suppress(DeadlinePassed):  # what is not normal is judged
        cluster.lab.wait_until(wrong, lambda said: not said.strip(), "all normal", deadline_s)
    seen.normal_s = time.monotonic() - began_s
    seen.still_out = _out(cluster)
    seen.submitted = set(cluster.submitted)
    shown = cluster.lab.ask("scontrol", "show", "jobs", "-o", deadline_s=120).stdout
    for line in shown.splitlines():
        job = parse_record(line)
        if job.get("JobId", "").isdigit():
            reason = job.get("Reason", "")
            seen.ended[int(job["JobId"])] = (job["JobState"], reason)
            seen.restarted += job.get("Restarts", "0") != "0"


def look_at_hooks(cluster: Cluster, seen: Seen) -> None:
    """Collect what each hook took, and what hooks said where something is wrong."""
    for node in cluster.lab.nodes:
        for line in cluster.said(node, TIMES).splitlines():
            words = line.split()
            if len(words) == 6:
                at_s, wall_s, user_s, system_s = map(float, words[1:5])
                seen.ran.append(
                    Ran(
                        hook=words[0],
                        node=node,
                        at_s=at_s,
                        wall_s=wall_s,
                        cpu_s=user_s + system_s,
                        code=int(words[5]),
                    )
                )
    for node in {*seen.still_out, *seen.drained, *seen.broken_in_pool}:
        seen.said[node] = cluster.said(node, LOG)[-1500:]


def _out(cluster: Cluster) -> dict[str, str]:
    found = {}
    for name, record in cluster.lab.node_states().items():
        words = record["State"].rstrip("*~#!%$@^-").split("+")
        if not {*words} <= _WELL:
            found[name] = f"{record['State']} {record.get('Reason', '')}"
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that so large a share of them does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def states(seen: Seen) -> Counter[str]:
    """Return how many jobs ended in each state."""
    return Counter(state for state, _ in seen.ended.values())
