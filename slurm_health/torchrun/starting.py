# SPDX-License-Identifier: Apache-2.0
"""The nodes that training starts with, and the addresses under which they find each other."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slurm_health.system import journal
from slurm_health.torchrun import unshared_check
from slurm_health.torchrun.arguments import Team, master_address
from slurm_health.torchrun.place import TaskPlace


@dataclass(frozen=True, kw_only=True)
class Starting:
    """The nodes that train, and addresses of nodes as far as they are known.

    `directory` is that of their check in the journal, None without one.
    """

    nodes: tuple[str, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)
    directory: Path | None = None


def all_of(place: TaskPlace | None) -> Starting:
    """Return all nodes that there are."""
    return Starting(nodes=place.nodes if place else ())


def place_among(place: TaskPlace, starting: Starting) -> TaskPlace:
    """Return the place of a node among those that train, for a later check of these.

    Where node 0 is not one of them, they meet on the first of them, which leads that check and
    names it, as node 0 does.
    """
    found = replace(place, nodes=starting.nodes)
    first, meeting = starting.nodes[0], place.meeting
    if meeting is None or first == place.nodes[0]:
        return found
    found = replace(
        found, meeting=replace(meeting, host=starting.addresses.get(first, meeting.host))
    )
    return unshared_check.named(found) if found.leads else found


def agent_environ(place: TaskPlace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the agent's environment: outside Slurm, too, it must find its own address."""
    environ = unshared_check.without_secret(environ)
    host = _master_host(place, environ) if place.chosen_start else ""
    if len(place.nodes) == 1 and "SLURM_LAUNCH_NODE_IPADDR" not in environ:
        host = "127.0.0.1"
    if not host:
        return environ
    try:
        # IPv4 first, which the workers' libraries prefer.
        found = sorted(socket.getaddrinfo(host, None), key=lambda each: each[0])
    except OSError:
        return environ
    return {**environ, "SLURM_LAUNCH_NODE_IPADDR": str(found[0][4][0])}


def _master_host(place: TaskPlace, environ: Mapping[str, str]) -> str:
    """Return the host of node 0, as the user or another scheduler says; empty where none does."""
    return place.meeting.host if place.meeting else master_address({}, environ)[0]


def addresses_in(directory: Path, nodes: Sequence[str], chosen: Sequence[str]) -> dict[str, str]:
    """Return the addresses that training depends on, under which nodes were reached in the check.

    These are the first node's of the `chosen` ones, and those of the nodes that are left out: if
    each of them read the files of all, they would open the square of their number.
    """
    among = frozenset(chosen)
    wanted = [chosen[0], *(node for node in nodes if node not in among)]
    written = [entry for node in wanted for entry in journal.read_all(directory, node)]
    return unshared_check.addresses(written)


def team_of(
    place: TaskPlace, starting: Starting, given: Mapping[str, str], environ: Mapping[str, str]
) -> Team | None:
    """Return the nodes that train, None where they can only meet as the user says.

    `given` are torchrun's options.
    """
    nodes, known = starting.nodes, starting.addresses
    left_out = set(place.nodes).difference(nodes)
    host = known.get(nodes[0], "")
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
        left_out=left_out | {known[node] for node in left_out & known.keys()},
        open=place.meeting is not None or may_be_joined(given),
    )


def may_be_joined(given: Mapping[str, str]) -> bool:
    """Tell whether the user has said where a training meets, so that another start can find it."""
    return {"rdzv_endpoint", "rdzv_id"} <= given.keys()


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
