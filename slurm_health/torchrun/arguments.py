# SPDX-License-Identifier: Apache-2.0
"""What torchrun gets beside what the user wrote: node counts, ranks and the rendezvous. Pure.

Where node 0 is, and which node this is, is read here too, as other schedulers say it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from slurm_health.preflight.chosen_probes import what_to_check
from slurm_health.records.errors import UsageError
from slurm_health.records.text import whole_number

# In this order. What trains reads the first of them too; the second is DLRover's.
_ADDRESSES = ("MASTER_ADDR", "DLROVER_MASTER_ADDR")
_RANKS = ("NODE_RANK", "GROUP_RANK")
_MOST_PORT = 65535
# Below the ports that Linux hands out by itself, so that no process sits on one by chance.
_FIRST_PORT = 20000
# A prime, so that none of the factors below divides it.
_PORTS = 12007
_SETS_NO_MEETING = {"nnodes", "node_rank", "max_restarts"}
# How long torchrun waits for more nodes once there are enough. Its own 30 s are for nodes that are
# still being started; ours come from a check together, and later ones are let in at any time.
_LAST_CALL_S = 10
CHECKS = ("network-check", "straggler-detection")  # which may be asked for
_CHECKING = {*CHECKS, "exclude-straggler"}


@dataclass(frozen=True, kw_only=True)
class NodeZeroAddress:
    """Host and port of node 0, as the others reach it."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """The same in one word."""
        return f"{bracketed(self.host)}:{self.port}"


def host_and_port(text: str) -> tuple[str, str]:
    """Return what `host`, `host:port`, `[v6]:port` or `v6` says; a port not there is empty."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    host, colon, port = text.rpartition(":")
    return (host, port) if colon and ":" not in host else (text, "")


def bracketed(host: str) -> str:
    """Return a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def master_address(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return host and port of node 0 as options and variables say, empty where they do not.

    `given` are torchrun's options, which include its `PET_` variables; they come first.
    """
    named = (given.get("master_addr"), *(environ.get(name) for name in _ADDRESSES))
    host, port = host_and_port(next((text for text in named if text), ""))
    return host, given.get("master_port") or port or environ.get("MASTER_PORT", "")


def node_rank(given: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return which node this is, as options and variables say; None where they do not."""
    named = (given.get("node_rank"), *(environ.get(name) for name in _RANKS))
    return next((text for text in named if text), None)


def node_zero_address(
    given: Mapping[str, str], environ: Mapping[str, str], port: int
) -> NodeZeroAddress | None:
    """Return where node 0 is to be found, None where nothing says it.

    It is where the training will meet: its port is known to be open between the nodes, and nobody
    uses it before the training does.

    Args:
        given: torchrun's options.
        environ: this process's environment.
        port: which port it is where nothing says it.

    Raises:
        UsageError: what stands for the port is none.
    """
    if given.get("rdzv_backend", "c10d") not in {"c10d", "static"}:
        return None  # the endpoint is a server of its own
    host, number = host_and_port(given.get("rdzv_endpoint", ""))
    if not host:
        host, number = master_address(given, environ)
    if not host:
        return None
    port_number = whole_number(number) if number else port
    if port_number is None or not 0 < port_number <= _MOST_PORT:
        raise UsageError(f"the port of node 0: expected 1 to {_MOST_PORT}, found {number!r}")
    return NodeZeroAddress(host=host, port=port_number)


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """A command line, read by torchrun's parser.

    `options` are those of torchrun as they were written, `program` is the training script with
    its own arguments. `given` holds what concerns nodes and rendezvous, as far as the command
    line or torchrun's own `PET_` variables say it; `own` those of our options that were given.
    """

    options: list[str]
    program: list[str]
    given: dict[str, str]
    standalone: bool = False
    own: dict[str, str | int | bool] = {}

    def text(self, name: str) -> str | None:
        """Return what was given for one of our options, None if nothing was."""
        value = self.own.get(name)
        return None if value is None else str(value)

    @property
    def exclude_straggler(self) -> bool:
        """Whether a slow node is treated like a faulty one."""
        return "exclude-straggler" in self.own

    @property
    def checks(self) -> bool:
        """Whether the nodes are to be checked first."""
        return not self.own.keys().isdisjoint(_CHECKING)

    @property
    def restarts(self) -> bool:
        """Whether torchrun may start workers again that have failed."""
        return self.given.get("max_restarts", "0") != "0"

    @property
    def check(self) -> str:
        """What is checked, as `--check` of the other commands would say it."""
        if "straggler-detection" in self.own:
            return what_to_check({name.replace("-", "_"): True for name in self.own})
        return "network-check"


@dataclass(frozen=True, kw_only=True)
class Team:
    """The nodes that train together, in the order of their ranks.

    `host` is the first of them as the others can reach it; `rendezvous_id` and `port` are the
    same on all nodes and different for every start. `left_out` holds names and addresses of nodes
    that were to take part and do not. `open`: others know where to meet, and may come later.
    """

    nodes: tuple[str, ...]
    node: str
    host: str
    port: int
    rendezvous_id: str
    left_out: Collection[str] = ()
    open: bool = False


def node_range(nnodes: str) -> tuple[int, int]:
    """Return the least and the most nodes that `N` or `MIN:MAX` allows.

    Raises:
        UsageError: it is neither.
    """
    least, colon, most = nnodes.partition(":")
    try:
        bounds = int(least), int(most if colon else least)
    except ValueError:
        bounds = (0, 0)
    if not 0 < bounds[0] <= bounds[1]:
        raise UsageError(f"--nnodes: expected N or MIN:MAX, found {nnodes!r}")
    return bounds


def port(*, job_id: int, attempt: int, step: int) -> int:
    """Return the port for one start of a job.

    It differs between the steps of an attempt, between the attempts of a job and between jobs of
    about the same time: along each of these it repeats after 12007.
    """
    return _FIRST_PORT + (step + 101 * attempt + 4099 * job_id) % _PORTS


def trains_alone(arguments: Arguments) -> bool:
    """Tell whether each process trains for itself, on one node."""
    nnodes = arguments.given.get("nnodes")
    return arguments.standalone or (nnodes is not None and node_range(nnodes)[1] == 1)


def command_line(arguments: Arguments, team: Team | None, environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's arguments, for one node of a team, or for one that trains alone."""
    given = arguments.given
    added: dict[str, str] = {}
    replaced: set[str] = set()
    if team is not None:
        static_options = {"node_rank", "master_addr", "master_port"} & given.keys()
        wants_static = "rdzv_endpoint" not in given and bool(static_options)
        backend = given.get("rdzv_backend") or ("static" if wants_static else "c10d")
        least, most = node_range(given.get("nnodes", "1"))
        is_range = least < most and backend != "static"
        count = len(team.nodes)
        # A range goes up to those that train: torchrun would wait for more, which do not come.
        # Where others may come it is as the user wrote it. The static rendezvous knows no range.
        within = given.get("nnodes") if team.open else f"{least}:{count}"
        added["nnodes"] = (
            within if is_range and within and (team.open or least < count) else str(count)
        )
        replaced |= {"nnodes"} if arguments.checks else set()
        meets_itself = count == 1 and not (team.open and is_range)  # on a port that is free
        if not meets_itself or not given.keys() <= _SETS_NO_MEETING:
            if backend == "c10d":
                added["rdzv_backend"] = backend
            if backend == "static":
                added["node_rank"] = str(team.nodes.index(team.node))
                replaced |= {"node_rank"} if team.left_out else set()
            else:
                added["rdzv_id"] = team.rendezvous_id
            where, moved = _meeting_point(given, team, environ, backend)
            added |= where
            replaced |= moved
            ours = f"{bracketed(team.host)}:"
            if not moved and added.get("rdzv_endpoint", "").startswith(ours):
                # torchrun would compare names, which fails where a node is known by several.
                last_call = f",last_call_timeout={_LAST_CALL_S}" if is_range else ""
                added["rdzv_conf"] = f"is_host={int(team.node == team.nodes[0])}{last_call}"
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in added.items()
        if name not in given or name in replaced
    ]
    # The last of several counts, so what is added holds whatever the user wrote.
    return [*arguments.options, *words, *arguments.program]


def _meeting_point(
    given: Mapping[str, str], team: Team, environ: Mapping[str, str], backend: str
) -> tuple[dict[str, str], set[str]]:
    """Return the options for where nodes meet, and which of them replace what the user gave.

    They are as given, as in the variables that training scripts use, or ours. What names a node
    that is left out moves to the first one that trains.
    """

    def is_left_out(host: str) -> bool:
        return bool({host, host.partition(".")[0]} & set(team.left_out))

    if backend not in ("static", "c10d"):
        return {}, set()
    if "rdzv_endpoint" in given:
        host, number = host_and_port(given["rdzv_endpoint"])
        if not is_left_out(host):
            return {}, set()
        endpoint = f"{bracketed(team.host)}:{number or team.port}"
        return {"rdzv_endpoint": endpoint}, {"rdzv_endpoint"}
    named, number = master_address(given, environ)
    host = team.host if not named or is_left_out(named) else named
    number = number or str(team.port)
    if backend == "c10d":
        return {"rdzv_endpoint": f"{bracketed(host)}:{number}"}, set()
    moved = {"master_addr"} if host != given.get("master_addr") else set()
    return {"master_addr": host, "master_port": number}, moved
