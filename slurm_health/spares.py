# SPDX-License-Identifier: Apache-2.0
"""How many nodes a job asks for, and how many it is to run on."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.errors import UsageError
from slurm_health.slurm import sbatch_options
from slurm_health.slurm.sbatch_options import CommandLine

_NODES = re.compile(r"(\d+)(?:-(\d+))?")
# Counts of the whole job: on fewer nodes than were allocated they would no longer fit.
_TOTALS = {
    "ntasks": "--ntasks-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "nodelist": "--exclude or --constraint",
    "nodefile": "--exclude or --constraint",
}


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """The nodes to ask Slurm for (`--nodes`), to run on, and to make do with."""

    request: str
    wanted: int
    needed: int


def node_counts(
    line: CommandLine, header: Sequence[bytes], settings: Mapping[str, str]
) -> NodeCounts | None:
    """Return what `--spares`, `--min-nodes` and a range of `--nodes` come to, None without any.

    Raises:
        UsageError: they do not go together with what else the job asks for.
    """
    spares = int(settings.get("spares", "0"))
    least = settings.get("min-nodes")
    asked = _asked(line, header)
    text = asked.get("nodes", "")
    found = _NODES.fullmatch(text)
    is_range = found is not None and found[2] is not None
    if not spares and least is None and not is_range:
        return None
    option = "--spares" if spares else "--min-nodes" if least else "--nodes"
    if found is None:
        raise UsageError(
            f"{option}: needs the number of nodes, as in --nodes=4 or --nodes=3-4"
            + (f", found --nodes={text}" if text else "")
        )
    unsuited = next((name for name in _TOTALS if name in asked), None)
    if unsuited is not None:
        if not spares and least is None:
            return None  # a plain range with totals is for Slurm alone to fit
        raise UsageError(
            f"{option}: does not go with --{unsuited}, which is for all nodes together;"
            f" use {_TOTALS[unsuited]}"
        )
    low, high = int(found[1]), int(found[2] or found[1])
    needed = low if least is None else int(least)
    if needed > high:
        raise UsageError(f"--min-nodes: {needed} is more than --nodes={text}")
    request = f"{low}-{high + spares}" if is_range else str(high + spares)
    return NodeCounts(request=request, wanted=high, needed=needed)


def _asked(line: CommandLine, header: Sequence[bytes]) -> dict[str, str]:
    """Return sbatch's options of the script and of the command line, which wins."""
    words: list[str] = []
    for text in header:
        if text.startswith(b"#SBATCH"):
            try:
                words += shlex.split(os.fsdecode(text[len(b"#SBATCH") :]), comments=True)
            except ValueError:
                continue  # sbatch will say what it thinks of it
    script = sbatch_options.parse(words, own={}, read_help=str)
    return {**script.values, **line.values}
