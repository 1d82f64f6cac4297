# SPDX-License-Identifier: Apache-2.0
"""Spare nodes that stay in the job while the script runs on the others.

Slurm gives a step any nodes of the job with free CPUs. A step of ours takes every CPU of the spare
nodes and sleeps, so the script's steps fit on the other nodes only: with any options, and in the
order and with the numbering that they would have in a job without spares.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

from slurm_health.preflight.supervisor.environ import as_bytes, as_text
from slurm_health.records.nodeset import expand, fold_in_order
from slurm_health.system.processes import PIPE, Process, close_pipes, end_sessions, start_tied
from slurm_health.system.slurm.command import OWN_STEPS, clean_environ

_HELD = b"held"
_HELD_S = 30.0  # the longest start of a step on a busy cluster
_END_S = 5.0
_MOST_OUTPUT_BYTES = 1 << 16


_NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")
_PER_NODE = ("SLURM_JOB_CPUS_PER_NODE", "SLURM_TASKS_PER_NODE")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class KeptSpares:
    """Steps that hold spare nodes, from its start until `end`."""

    def __init__(
        self, nodes: Sequence[str], environ: Mapping[bytes, bytes], mask: Collection[int]
    ) -> None:
        """Hold these nodes of the job that `environ` describes, by steps with `mask`."""
        text = as_text(environ)
        clean = as_bytes(clean_environ(text))
        self._steps: dict[str, Process] = {}
        self.not_held: dict[str, str] = {}
        # Not in the job's output, where `srun: error: n4: task 0: Killed` would look like the end
        # of the script's own task 0.
        self._errors = os.memfd_create("slurm-health-spares", os.MFD_CLOEXEC)
        for node in nodes:
            try:
                self._steps[node] = start_tied(
                    srun_argv(node, text),
                    environ=clean,
                    stdout=PIPE,
                    stderr=self._errors,
                    signal_mask=mask,
                )
            except OSError as err:
                self.not_held[node] = str(err)
        deadline = time.monotonic() + _HELD_S
        for node, step in self._steps.items():
            if not _holds(step, deadline):
                output = os.pread(self._errors, _MOST_OUTPUT_BYTES, 0).decode(errors="replace")
                why = (output.splitlines() or ["srun gives no reason"])[-1]
                self.not_held[node] = f"the step that is to hold it did not start: {why}"

    def end(self) -> None:
        """Release the nodes."""
        end_sessions(list(self._steps.values()), grace_s=_END_S)
        for step in self._steps.values():
            close_pipes(step)
        self._steps = {}
        os.close(self._errors)


def srun_argv(node: str, environ: Mapping[str, str]) -> list[str]:
    """Return the srun command of the step that holds a node."""
    return [
        "srun",
        f"--jobid={environ.get('SLURM_JOB_ID', '')}",
        f"--nodelist={node}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={cpus_of(node, environ)}",
        "--mem=0",
        "--gres=none",
        "--cpu-bind=none",
        "--mpi=none",
        "--no-kill",
        "--input=none",
        f"--job-name={OWN_STEPS}spare",
        "sh",
        "-c",
        f"echo {_HELD.decode()}; exec sleep infinity",
    ]


def cpus_of(node: str, environ: Mapping[str, str]) -> int:
    """Return the number of CPUs that a job has on a node; 1 if Slurm gives none."""
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    nodes = expand(nodelist) if nodelist else ()
    counts = unpacked(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return counts[nodes.index(node)] if node in nodes and len(counts) == len(nodes) else 1


def _holds(step: Process, deadline: float) -> bool:
    assert step.stdout is not None
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([step.stdout], [], [], left_s)[0]:
            return False
        output = os.read(step.stdout.fileno(), 64)
        if _HELD in output or not output:
            return bool(output)
    return False


def resized_environ(environ: Mapping[str, str], keep: Sequence[str]) -> dict[str, str]:
    """Return the variables that differ once the job has only `keep`.

    A variable that the job lacks is not added, except by Slurm's rule that task counts follow from
    the tasks per node.
    """
    nodelist = next((environ[name] for name in _NODELISTS if name in environ), "")
    nodes = expand(nodelist) if nodelist else ()
    kept_nodes = frozenset(keep)
    kept = [position for position, node in enumerate(nodes) if node in kept_nodes]
    # In the job's order, for scripts that expect task 0 on the first node.
    folded = fold_in_order(nodes[position] for position in kept)
    new: dict[str, str] = dict.fromkeys(_NODELISTS, folded)
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
    """Return a number per node from Slurm's `2(x3),1`; none from other text."""
    values: list[int] = []
    for part in filter(None, text.split(",")):
        match = _REPEATED.fullmatch(part)
        if match is None:
            return []
        values += [int(match[1])] * int(match[2] or 1)
    return values


def packed(values: Sequence[int]) -> str:
    """Return Slurm's `2(x3),1` for a number per node."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return ",".join(f"{value}(x{count})" if count > 1 else str(value) for value, count in runs)
