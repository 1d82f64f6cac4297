# SPDX-License-Identifier: Apache-2.0
"""Where one process of `slurm-health run` stands among the others, from its environment.

And where the nodes that train meet.
"""

from __future__ import annotations

import secrets
import socket
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
    Team,
    master_address,
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
class TaskPlace(Allocation):
    """One process per node, all started at the same time, in a job or outside Slurm.

    Args:
        node: of this process, one of the `nodes`.
        start: tells this start from every other one, and is the same for all its processes.
        chosen_start: the user has chosen that name, which may have been used before.
        step: numbers the starts of one attempt of a job.
        meeting: where the others reach the first process for a check, if they share no directory.
    """

    node: str
    start: str
    attempt: int = 0
    cluster: str = OUTSIDE_SLURM
    partition: str = ""
    step: int = 0
    chosen_start: bool = False
    meeting: NodeZeroAddress | None = None

    @property
    def leads(self) -> bool:
        """Whether this process runs the check for all."""
        return self.node == self.nodes[0]

    @property
    def port(self) -> int:
        """The port where the processes meet if none is given."""
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
    job = replace(job, nodes=nodes)
    return TaskPlace(**vars(job), node=node, start=start, step=step)


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
    job = replace(job, nodes=(node,))
    return TaskPlace(**vars(job), node=node, start=f"{job.job_id}.{job.attempt}.{now_s}")


def _step_nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return expand(environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError as err:
        raise AllocationError("SLURM_STEP_NODELIST", str(err)) from err


def _outside_slurm(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    """Return the place that NODE_RANK and --nnodes give, None if they give none."""
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
        nodes=tuple(f"node{place}" for place in range(count)),
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


def named(place: TaskPlace) -> TaskPlace:
    """Return node 0's place with a name for this start, so that the same command can come again.

    One `--rdzv-id` at one meeting point is one job, each of whose starts has a journal; without it
    each start is a job.
    """
    assert place.meeting is not None
    start = secrets.token_hex(4)
    job = start if place.start == "none" else f"{place.start} {place.meeting.text}"
    return replace(place, start=start, job_id=zlib.crc32(job.encode()))


def place_among(
    place: TaskPlace, nodes: tuple[str, ...], addresses: Mapping[str, str]
) -> TaskPlace:
    """Return the place of a node among those that train, for a later check of these.

    Where node 0 is not one of them, they meet on the first of them, which leads that check and
    names it, as node 0 does.
    """
    moved = replace(place, nodes=nodes)
    if place.meeting is None or nodes[0] == place.nodes[0]:
        return moved
    host = addresses.get(nodes[0], place.meeting.host)
    moved = replace(moved, meeting=replace(place.meeting, host=host))
    return named(moved) if moved.leads else moved


def agent_environ(place: TaskPlace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the agent's environment: outside Slurm, too, it must find its own address."""
    host = _master_host(place, environ) if place.chosen_start else ""
    if len(place.nodes) == 1 and "SLURM_LAUNCH_NODE_IPADDR" not in environ:
        host = "127.0.0.1"
    if not host:
        return environ
    try:
        # IPv4 first, which the workers' libraries prefer.
        places = sorted(socket.getaddrinfo(host, None), key=lambda place: place[0])
    except OSError:
        return environ
    return {**environ, "SLURM_LAUNCH_NODE_IPADDR": str(places[0][4][0])}


def team_of(
    place: TaskPlace,
    nodes: tuple[str, ...],
    addresses: Mapping[str, str],
    given: Mapping[str, str],
    environ: Mapping[str, str],
) -> Team | None:
    """Return the nodes that train, None where they can only meet as the user says.

    `addresses` are known ones of nodes, `given` torchrun's options.
    """
    left_out = set(place.nodes).difference(nodes)
    host = addresses.get(nodes[0], "")
    if place.chosen_start:
        master = _master_host(place, environ)  # by custom the first node
        if place.nodes[0] in left_out and master:
            left_out.add(master)
        host = (master if nodes[0] == place.nodes[0] else "") or host or master
        if not host:
            return None
    elif not host or _resolves(nodes[0]):
        host = nodes[0]
    return Team(
        nodes=nodes,
        node=place.node,
        host=host,
        port=place.meeting.port if place.meeting else place.port,
        rendezvous_id="none" if place.meeting else place.start,
        left_out=left_out | {addresses[node] for node in left_out & addresses.keys()},
        open=place.meeting is not None or may_be_joined(given),
    )


def may_be_joined(given: Mapping[str, str]) -> bool:
    """Tell whether the user has said where a training meets, so that another start can find it."""
    return {"rdzv_endpoint", "rdzv_id"} <= given.keys()


def _master_host(place: TaskPlace, environ: Mapping[str, str]) -> str:
    """Return the host of node 0, as the user or another scheduler says; empty where none does."""
    return place.meeting.host if place.meeting else master_address({}, environ)[0]


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
