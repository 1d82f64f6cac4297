# SPDX-License-Identifier: Apache-2.0
"""Where a training hangs whose ranks say nothing: by what they wait for in the kernel, and TCP."""

from __future__ import annotations

import re

from slurm_health.records.script_records import MOST_LINES
from slurm_health.records.text import listed
from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Inference, Sureness
from slurm_health.training.diagnosis.seen import (
    STOPPED,
    RankSeen,
    Standstill,
    broken_line,
    nodes_of,
    ranks_of,
    shared_end,
    who,
)

# Functions of the kernel in which a process waits for a file, a pipe or a filesystem. Ranks that
# wait for each other are in futexes, polls and sockets.
_FILES = re.compile(
    r"wait_for_partner|pipe_(?:read|wait)|fuse|request_wait_answer|nfs|rpc_wait|lustre|cl_(?:io|sync)"
    r"|ldlm|ceph|cxi|gpfs|beegfs|folio_wait|wait_on_page|io_schedule|flock|locks?_"
)


def file_awaited(_: Inference, data: Collected) -> Inference | None:
    """Some ranks wait in the kernel for a file, and the others do not.

    No rank says where it is, and none is gone or stopped, which says more.
    """
    waiting = _awaiting(data)
    if not waiting:
        return None
    several = len(waiting) > 1
    return Inference(
        name="file-awaited",
        description=f"{who(waiting)} {'wait' if several else 'waits'} for a file, a pipe or a"
        " filesystem, and no other rank does",
        sureness=Sureness.LIKELY,
        nodes=nodes_of(waiting),
        ranks=ranks_of(waiting),
        evidence=tuple(
            f"rank {each.rank} on {each.node}: process {each.pid}, state {each.state},"
            f" waits in the kernel: {each.kernel}"
            for each in waiting[:MOST_LINES]
        ),
        advice="look at the files that it has open there (ls -l /proc/PID/fd), and whether"
        " their filesystems answer on this node",
    )


def connections_unanswered(_: Inference, data: Collected) -> Inference | None:
    """Connections between nodes of the job are not answered, and no rank says where it is.

    It is the node that all of them share, where there is one.
    """
    standstill = _silent(data)
    if standstill is None or not standstill.paths or _awaiting(data):
        return None
    nodes, means = shared_end(standstill.paths)
    return Inference(
        name="network-of-group",
        description=f"data between nodes of the job is not answered: the network between"
        f" {listed(nodes)}; {means}",
        sureness=Sureness.LIKELY,
        nodes=nodes,
        ranks=ranks_of(each for each in standstill.ranks if each.node in nodes),
        evidence=tuple(map(broken_line, standstill.paths[:MOST_LINES])),
        advice="check these nodes' connections before the next start (slurm-health check"
        " --network-check)",
    )


def _silent(data: Collected) -> Standstill | None:
    """Return what was seen, where no rank says where it is."""
    found = data.get(Standstill)
    if found is None or any(each.stack for each in found.ranks):
        return None
    told = any(each.gone or each.state == STOPPED for each in found.ranks)
    return None if told else found


def _awaiting(data: Collected) -> list[RankSeen]:
    """Return the ranks that wait for a file, unless all wait for the same."""
    found = _silent(data)
    ranks = found.ranks if found else ()
    waits = [{word for word in each.kernel.split(", ") if _FILES.search(word)} for each in ranks]
    # What all have in common is how the program waits: a data loader's workers read from pipes.
    common = set.intersection(*waits) if waits else set()
    awaiting = [each for each, words in zip(ranks, waits, strict=True) if words - common]
    return awaiting if len(awaiting) < len(ranks) else []
