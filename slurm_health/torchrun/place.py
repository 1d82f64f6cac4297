# SPDX-License-Identifier: Apache-2.0
"""Where one process of `slurm-health run` stands among the others, from its environment. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from slurm_health.preflight.master.run_check import LOCAL_CLUSTER
from slurm_health.records import allocation
from slurm_health.records.allocation import Allocation
from slurm_health.records.errors import AllocationError, UsageError
from slurm_health.records.nodeset import expand
from slurm_health.records.text import whole_number
from slurm_health.torchrun.arguments import (
    Arguments,
    NodeZeroAddress,
    node_range,
    node_rank,
    node_zero_address,
    port,
    trains_alone,
)

# From here on Slurm numbers what is no step of srun's: batch script, interactive shell, container.
_SPECIAL_STEPS = 0xFFFFFF00
OUTSIDE_SLURM = "torchrun"


@dataclass(frozen=True, kw_only=True)
class TaskPlace:
    """One process per node, all started at the same time.

    `start` tells this start from every other one and is the same for all its processes; where it
    was chosen by the user (`chosen_start`) it may have been used before. `step` numbers the starts
    of one attempt of a job. `meeting` is where the first process is to be found by the others of a
    check, where they share no directory.
    """

    nodes: tuple[str, ...]
    node: str
    start: str
    job_id: int
    attempt: int = 0
    step: int = 0
    cluster: str = OUTSIDE_SLURM
    partition: str = ""
    array: str = ""
    start_time_s: int | None = None
    chosen_start: bool = False
    meeting: NodeZeroAddress | None = None

    @property
    def leads(self) -> bool:
        """Whether this process runs the check for all."""
        return self.node == self.nodes[0]

    @property
    def port(self) -> int:
        """Where the processes meet, unless they are told otherwise."""
        return port(job_id=self.job_id, attempt=self.attempt, step=self.step)


def find(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    """Return the place of this process, None where it has nothing to do with any other.

    Raises:
        UsageError: it was started in a way that cannot work, as from a batch script without srun.
        AllocationError: Slurm's variables cannot be read.
    """
    if "SLURM_JOB_ID" not in environ:
        return None if trains_alone(arguments) else _outside_slurm(arguments, environ)
    if _in_step(environ):
        return _in_slurm(arguments, environ)
    nodes = allocation.from_environ(environ).nodes
    if len(nodes) > 1 and not trains_alone(arguments):
        raise UsageError(
            f"the job has {len(nodes)} nodes and this runs on one of them, once; start it on each:"
            " srun --ntasks-per-node=1 slurm-health run ..."
            " (or train on this node alone with --nnodes=1)"
        )
    return None


def _in_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _SPECIAL_STEPS and "SLURMD_NODENAME" in environ


def _in_slurm(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    job = allocation.from_environ(environ)
    nodes = _step_nodes(environ)
    node = environ["SLURMD_NODENAME"]
    if node not in nodes:
        raise AllocationError("SLURM_STEP_NODELIST", f"does not hold this node, {node}")
    if int(environ.get("SLURM_STEP_NUM_TASKS") or len(nodes)) > len(nodes):
        if trains_alone(arguments) and not arguments.checks:
            return None
        raise UsageError(
            "torchrun starts the processes of a node by itself, so one task per node is enough:"
            " srun --ntasks-per-node=1 slurm-health run --nproc-per-node=N ..."
        )
    step = int(environ["SLURM_STEP_ID"])
    # Slurm counts jobs anew when it loses its state; then only time, or srun's port, differs.
    stamp = job.start_time_s or environ.get("SLURM_SRUN_COMM_PORT", "")
    start = f"{job.job_id}.{job.attempt}.{step}.{stamp}".rstrip(".")
    return _in_job(job, nodes=nodes, node=node, start=start, step=step)


def speaks_for_step(environ: Mapping[str, str]) -> bool:
    """Tell whether this process says what all of its step would say alike: its first task."""
    return not _in_step(environ) or environ.get("SLURM_PROCID", "0") == "0"


def single(environ: Mapping[str, str], *, host: str, now_s: int) -> TaskPlace:
    """Return the place of a process that has nothing to do with others, on the machine `host`."""
    node = environ.get("SLURMD_NODENAME") or host
    if "SLURM_JOB_ID" not in environ:
        return TaskPlace(
            nodes=(node,), node=node, start=str(now_s), job_id=now_s, cluster=LOCAL_CLUSTER
        )
    job = allocation.from_environ(environ)
    return _in_job(job, nodes=(node,), node=node, start=f"{job.job_id}.{job.attempt}.{now_s}")


def _in_job(
    job: Allocation, *, nodes: tuple[str, ...], node: str, start: str, step: int = 0
) -> TaskPlace:
    return TaskPlace(
        nodes=nodes,
        node=node,
        start=start,
        job_id=job.job_id,
        attempt=job.attempt,
        step=step,
        cluster=job.cluster,
        partition=job.partition,
        array=job.array,
        start_time_s=job.start_time_s,
    )


def _step_nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return expand(environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError as err:
        raise AllocationError("SLURM_STEP_NODELIST", str(err)) from err


def _outside_slurm(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    """Return the place that NODE_RANK and --nnodes tell, None where they tell none."""
    given = arguments.given
    rank = node_rank(given, environ)
    nnodes = given.get("nnodes")
    if nnodes is None:
        return None
    _, count = node_range(nnodes)
    if rank is None:
        if arguments.checks:
            raise UsageError(
                "a check of several nodes outside Slurm needs the rank of each: NODE_RANK, from 0"
                " on, or --node-rank"
            )
        return None
    if (number := whole_number(rank)) is None or number >= count:
        raise UsageError(f"node rank: expected a number below {count} (--nnodes), found {rank!r}")
    start = given.get("rdzv_id", "")
    job_id = zlib.crc32(start.encode())
    place = TaskPlace(
        nodes=tuple(f"node{each}" for each in range(count)),
        node=f"node{number}",
        start=start or "none",
        job_id=job_id,
        chosen_start=True,
    )
    if not arguments.checks:
        return place
    where = node_zero_address(given, environ, place.port)
    if where is None and not start:
        raise UsageError(
            "a check of several nodes outside Slurm needs the address of node 0: MASTER_ADDR, or"
            " --master-addr; or, with a --journal that all nodes share, --rdzv-id, the same on all"
            " and new for every start"
        )
    return replace(place, meeting=where)
