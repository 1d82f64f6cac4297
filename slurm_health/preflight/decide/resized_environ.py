# SPDX-License-Identifier: Apache-2.0
"""The SLURM_ variables of a job that goes on with some of its nodes.

Slurm changes the job and leaves its variables to a script that unsets the task counts; a training
script that was submitted for these nodes expects what it would have got for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from slurm_health.records.nodeset import expand, fold

_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE = ("SLURM_JOB_CPUS_PER_NODE", "SLURM_TASKS_PER_NODE")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def changes(environ: Mapping[str, str], keep: Sequence[str]) -> dict[str, str]:
    """Return the variables that differ once the job holds only `keep`.

    A variable the job does not have is not invented, except by Slurm's rule that task counts
    follow from the tasks per node.
    """
    nodelist = next((environ[name] for name in _NODELISTS if name in environ), "")
    nodes = expand(nodelist) if nodelist else ()
    kept_nodes = frozenset(keep)
    kept = [position for position, node in enumerate(nodes) if node in kept_nodes]
    new: dict[str, str] = dict.fromkeys(_NODELISTS, fold(keep))
    new |= dict.fromkeys(_COUNTS, str(len(keep)))
    for name in _PER_NODE:
        values = unpacked(environ.get(name, ""))
        if len(values) == len(nodes):
            new[name] = packed([values[position] for position in kept])
    tasks = unpacked(new.get("SLURM_TASKS_PER_NODE", ""))
    if tasks:
        new |= dict.fromkeys(_TASKS, str(sum(tasks)))
    return {name: value for name, value in new.items() if name in environ}


def unpacked(text: str) -> list[int]:
    """Return one number per node from Slurm's `2(x3),1`; nothing if it is not that."""
    values: list[int] = []
    for part in filter(None, text.split(",")):
        found = _REPEATED.fullmatch(part)
        if found is None:
            return []
        values += [int(found[1])] * int(found[2] or 1)
    return values


def packed(values: Sequence[int]) -> str:
    """Return Slurm's `2(x3),1` for one number per node."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return ",".join(f"{value}(x{count})" if count > 1 else str(value) for value, count in runs)
