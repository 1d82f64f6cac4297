# SPDX-License-Identifier: Apache-2.0
"""Ranks, nodes and signals in a few words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm_health.records.nodeset import fold
from slurm_health.records.records import Diagnosed

SIGKILL, SIGTERM = 9, 15
# Advice about a process that lives, by its number.
_OF_A_PROCESS = re.compile(r"kill -CONT \d+|/proc/")
# By their numbers on Linux, as signal(7) has them; other numbers differ between machines.
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    15: "SIGTERM",
}


def signal_text(number: int) -> str:
    """Return `SIGSEGV`, or `signal 40` for one without a name here."""
    return _SIGNALS.get(number, f"signal {number}")


def listed(nodes: Sequence[str]) -> str:
    """Return nodes as a short list; names that no node list can hold, as they are."""
    try:
        return fold(list(nodes))
    except ValueError:
        return ", ".join(nodes)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-7`, `ranks 1,4`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    text = ",".join("-".join(map(str, run)) for run in runs)
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"


def advice_afterwards(found: Diagnosed) -> str:
    """Return what helps once the script that hung has ended: its processes are gone."""
    if not found.advice:
        return ""
    if _OF_A_PROCESS.search(found.advice):
        return "should it hang again, look at it while it runs: slurm-health report names the rank"
    return f"should it hang again: {found.advice}"
