# SPDX-License-Identifier: Apache-2.0
"""How many nodes a job asks for, and how many it is to run on."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slurm_health.preflight.sbatch.arguments import CommandLine, parse
from slurm_health.records.errors import UsageError

_NODES = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
# What would no longer fit on fewer nodes than were allocated, why, and what to use.
_UNFIT = {
    "ntasks": ("counts for all nodes together", "--ntasks-per-node"),
    "gpus": ("counts for all nodes together", "--gpus-per-node"),
    "nodelist": ("names nodes that the job must have", "--exclude or --constraint"),
    "nodefile": ("names nodes that the job must have", "--exclude or --constraint"),
}
# In sbatch's order: of two for one option the later wins.
_VARIABLES = {
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_CONTAINER": "container",
    "SBATCH_EXPORT": "export",
    "SBATCH_GPUS": "gpus",
    "SBATCH_PARTITION": "partition",
    "SBATCH_TIMELIMIT": "time",
}


@dataclass(frozen=True, kw_only=True)
class NodeCounts:
    """The nodes to ask Slurm for (`--nodes`), to run on, and to make do with.

    `tasks_per_node` is set where the job asked for a total, which counts its own nodes alone.
    """

    request: str
    wanted: int
    needed: int
    spares: int = 0
    tasks_per_node: int = 0

    @property
    def options(self) -> list[str]:
        """What sbatch is given for them."""
        if not self.tasks_per_node:
            return [f"--nodes={self.request}"]
        total = self.tasks_per_node * (self.wanted + self.spares)
        per_node = f"--ntasks-per-node={self.tasks_per_node}"
        return [f"--nodes={self.request}", f"--ntasks={total}", per_node]


def node_counts(asked: Mapping[str, str], spares: int) -> NodeCounts | None:
    """Return what `--spares` and a range of `--nodes` come to, None without either.

    Raises:
        UsageError: they do not go together with what else the job asks for.
    """
    text = asked.get("nodes", "")
    match = _NODES.fullmatch(text)
    is_range = match is not None and match[2] is not None
    if not spares and not is_range:
        return None
    if match is None:
        raise UsageError(
            "--spares: needs the number of nodes, as in --nodes=4 or --nodes=3-4"
            + (f", found --nodes={text}" if text else "")
        )
    per_node = 0
    if not is_range:
        per_node = _tasks_per_node(asked, int(match[1]))
    unsuited = next((n for n in _UNFIT if n in asked and (n != "ntasks" or not per_node)), None)
    if unsuited is not None:
        if not spares:
            return None  # a plain range with totals is for Slurm alone to fit
        why, instead = _UNFIT[unsuited]
        if unsuited == "ntasks" and (per_node := _tasks_per_node(asked, int(match[1]))):
            instead = f"--ntasks-per-node={per_node}"
        raise UsageError(
            f"--spares: cannot be combined with --{unsuited}, which {why}; use {instead}"
        )
    low, high = int(match[1]), int(match[2] or match[1])
    request = f"{low}-{high + spares}" if is_range else str(high + spares)
    return NodeCounts(
        request=request, wanted=high, needed=low, spares=spares, tasks_per_node=per_node
    )


def _tasks_per_node(asked: Mapping[str, str], nodes: int) -> int:
    """Return how many tasks of a total are for each node; 0 where they are not the same for all."""
    tasks, given = asked.get("ntasks", ""), asked.get("ntasks-per-node", "")
    if not tasks.isdecimal() or not nodes or int(tasks) % nodes:
        return 0
    per_node = int(tasks) // nodes
    return per_node if given in {"", str(per_node)} else 0


def options_asked(
    line: CommandLine,
    header: Sequence[bytes],
    environ: Mapping[str, str],
    read_help: Callable[[], str],
) -> dict[str, str]:
    """Return sbatch's options: the command line wins over its variables, these over the script.

    `read_help` returns the text of `sbatch --help`. sbatch reads the script's lines all together.
    """
    script = parse(list(_words(header)), own={}, read_help=read_help).values
    variables = {name: environ[key] for key, name in _VARIABLES.items() if environ.get(key)}
    return {**script, **variables, **line.values}


def _words(header: Sequence[bytes]) -> Iterator[str]:
    """Yield the words of sbatch's lines."""
    for text in header:
        if text.startswith(b"#SBATCH"):
            try:
                yield from shlex.split(os.fsdecode(text[len(b"#SBATCH") :]), comments=True)
            except ValueError:
                continue  # sbatch will say what it thinks of it
