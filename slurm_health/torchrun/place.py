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
from slurm_health.torchrun.arguments import (
    Arguments,
    Bounds,
    NodeZeroAddress,
    bracketed,
    host_and_port,
    master_address,
    node_rank,
    node_zero_address,
)

# How long torchrun waits for more nodes once there are enough. Its own 30 s are for nodes that are
# still being started; ours come from a check together, and later ones are let in at any time.
_LAST_CALL_S = 10
# From here on Slurm numbers what is no step of srun's: batch script, interactive shell, container.
_SPECIAL_STEPS = 0xFFFFFF00
OUTSIDE_SLURM = "torchrun"
# Below the ports that Linux hands out by itself, so that no process sits on one by chance.
_FIRST_PORT = 20000
# A prime, so that none of the factors of a port's number divides it.
_PORTS = 12007


@dataclass(frozen=True, kw_only=True)
class TaskPlace(Allocation):
    """One process per node, all started at the same time, in a job or outside Slurm.

    Args:
        node: of this process, one of the `nodes`.
        start: tells this start from every other one, and is the same for all its processes.
        step: numbers the starts of one attempt of a job.
        meeting: where the training meets, if the nodes share no directory; at the port beside it
            the others reach the first process.
    """

    node: str
    start: str
    attempt: int = 0
    cluster: str = OUTSIDE_SLURM
    partition: str = ""
    step: int = 0
    meeting: NodeZeroAddress | None = None

    @property
    def leads(self) -> bool:
        """Whether this process runs the check for all."""
        return self.node == self.nodes[0]

    @property
    def port(self) -> int:
        """The port where the processes meet if none is given.

        It differs between the steps of an attempt, between the attempts of a job and between jobs
        of about the same time: along each of these it repeats after 12007.
        """
        return _FIRST_PORT + (self.step + 101 * self.attempt + 4099 * self.job_id) % _PORTS


def find(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    """Return the place of this process, None where it has nothing to do with any other.

    Raises:
        UsageError: it was started in a way that cannot work, as from a batch script without srun.
        AllocationError: Slurm's variables cannot be read.
    """
    if "SLURM_JOB_ID" not in environ:
        return None if arguments.trains_alone else _outside_slurm(arguments, environ)
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEPS and "SLURMD_NODENAME" in environ:
        return _in_slurm(arguments, environ)
    nodes = allocation.from_environ(environ).nodes
    if len(nodes) > 1 and not arguments.trains_alone:
        raise UsageError(
            f"the job has {len(nodes)} nodes and this runs on one of them, once; start it on each:"
            " srun --ntasks-per-node=1 slurm-health run ..."
            " (or train on this node alone with --nnodes=1)"
        )
    return None


def _in_slurm(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    job = allocation.from_environ(environ)
    try:
        nodes = expand(environ.get("SLURM_STEP_NODELIST", ""))
    except ValueError as err:
        raise AllocationError("SLURM_STEP_NODELIST", str(err)) from err
    node = environ["SLURMD_NODENAME"]
    if node not in nodes:
        raise AllocationError("SLURM_STEP_NODELIST", f"does not hold this node, {node}")
    if int(environ.get("SLURM_STEP_NUM_TASKS") or len(nodes)) > len(nodes):
        if arguments.trains_alone and not arguments.checks:
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


def _outside_slurm(arguments: Arguments, environ: Mapping[str, str]) -> TaskPlace | None:
    """Return the place that NODE_RANK, --nnodes and node 0's address give, None if they give none.

    Raises:
        UsageError: one of them is impossible, or missing and needed for a check.
    """
    given, nnodes = arguments.given, arguments.nnodes
    if nnodes is None:
        return None
    rank, start = node_rank(given, environ), given.get("rdzv_id", "none")
    place = TaskPlace(
        nodes=tuple(f"node{number}" for number in range(nnodes.most)),
        node=f"node{rank}",
        start=start,
        job_id=zlib.crc32(start.encode()),
    )
    meeting = node_zero_address(given, environ, place.port)
    if rank is None or meeting is None or not arguments.meets_by_itself:
        if arguments.checks:
            raise UsageError(
                "a check of several nodes outside Slurm needs the rank of each (NODE_RANK, from 0"
                " on, or --node-rank), the address of node 0 (MASTER_ADDR or --master-addr), and"
                " --rdzv-backend=c10d"
            )
        return None
    if place.node not in place.nodes:
        expected = f"expected a number below {nnodes.most} (--nnodes)"
        raise UsageError(f"node rank: {expected}, found {rank!r}")
    return replace(place, meeting=meeting)


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
    place: TaskPlace, nodes: tuple[str, ...], addresses: Mapping[str, str], start: str
) -> TaskPlace:
    """Return the place of a node for a start among those that train.

    If node 0 is not one of them, they meet on the first of them, which leads the start and names
    it, as node 0 does.
    """
    moved = replace(place, nodes=nodes, start=start)
    if place.meeting is None or nodes[0] == place.nodes[0]:
        return moved
    host = addresses.get(nodes[0], place.meeting.host)
    moved = replace(moved, meeting=replace(place.meeting, host=host))
    return named(moved) if moved.leads else moved


def agent_environ(place: TaskPlace, environ: Mapping[str, str], own_host: str) -> Mapping[str, str]:
    """Return the agent's environment: outside Slurm, too, it must find its own address."""
    host = own_host or (place.meeting.host if place.meeting else "")
    if not host and len(place.nodes) == 1 and "SLURM_LAUNCH_NODE_IPADDR" not in environ:
        host = "127.0.0.1"
    if not host:
        return environ
    try:
        # IPv4 first, which the workers' libraries prefer.
        addresses = sorted(socket.getaddrinfo(host, None), key=lambda address: address[0])
    except OSError:
        return environ
    return {**environ, "SLURM_LAUNCH_NODE_IPADDR": str(addresses[0][4][0])}


def torchrun_line(
    arguments: Arguments,
    place: TaskPlace | None,
    everyone: tuple[str, ...],
    addresses: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    ours: bool,
) -> list[str]:
    """Return torchrun's arguments: the user's, and what is not given.

    Args:
        arguments: of the command.
        place: of this process among those that train, None if it trains alone or knows no others.
        everyone: the nodes that `run` was started on; by custom the user's options name the first.
        addresses: known ones of nodes.
        environ: this process's environment.
        ours: the nodes were chosen by us, and what follows a failure is.
    """
    given = arguments.given
    nnodes = arguments.nnodes or Bounds(least=1, most=1)
    added = {"max_restarts": "0"} if ours and arguments.max_restarts else {}
    replaced = {"max_restarts", "nnodes"} if ours else set[str]()
    if place is not None:
        # Outside Slurm a node may come later. Otherwise torchrun would wait for nodes in vain.
        most = nnodes.most if place.meeting else len(place.nodes)
        is_range = nnodes.least < min(nnodes.most, most)
        added["nnodes"] = f"{nnodes.least}:{most}" if is_range else str(len(place.nodes))
        added |= {"rdzv_backend": "c10d", "rdzv_id": "none" if place.meeting else place.start}
    if place is not None and arguments.meets_by_itself:
        left_out = set(everyone).difference(place.nodes)
        left_out |= {addresses[node] for node in left_out & addresses.keys()}
        if everyone[0] in left_out:
            left_out |= {master_address({}, environ)[0]} - {""}
        first = place.nodes[0]
        own = addresses.get(first) or first  # as the others reach it
        if place.meeting is not None and (first == everyone[0] or own == first):
            own = place.meeting.host
        host, number = host_and_port(given.get("rdzv_endpoint", ""))
        if not host:
            host, number = master_address(given, environ)
        # What names a node that does not train names the first one that does.
        moved = bool({host, host.partition(".")[0]} & left_out)
        replaced |= {"rdzv_endpoint"} if moved else set()
        host = own if moved or not host else host
        number = number or str(place.meeting.port if place.meeting else place.port)
        added["rdzv_endpoint"] = f"{bracketed(host)}:{number}"
        if host == own and ("rdzv_endpoint" not in given or moved):
            # torchrun would compare names, which fails where a node is known by several.
            last_call = f",last_call_timeout={_LAST_CALL_S}" if nnodes.least < nnodes.most else ""
            added["rdzv_conf"] = f"is_host={int(place.leads)}{last_call}"
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in added.items()
        if name not in given or name in replaced
    ]
    # The last of several counts, so what is added holds whatever the user wrote.
    return [*arguments.options, *words, *arguments.program]
