# SPDX-License-Identifier: Apache-2.0
"""What torchrun is told beside what the user wrote: node counts, ranks and the rendezvous. Pure.

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
        UsageError: what is said is no port.
    """
    if given.get("rdzv_backend", "c10d") not in {"c10d", "static"}:
        return None  # the endpoint is a server of its own
    host, number = host_and_port(given.get("rdzv_endpoint", ""))
    if not host:
        host, number = master_address(given, environ)
    if not host:
        return None
    found = whole_number(number) if number else port
    if found is None or not 0 < found <= _MOST_PORT:
        raise UsageError(f"the port of node 0: expected 1 to {_MOST_PORT}, found {number!r}")
    return NodeZeroAddress(host=host, port=found)


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
    added = [] if team is None else _added(arguments, team, environ)
    # The last of several counts, so what is added holds whatever the user wrote.
    return [*arguments.options, *added, *arguments.program]


def _added(arguments: Arguments, team: Team, environ: Mapping[str, str]) -> list[str]:
    given = arguments.given
    added = []
    if "nnodes" not in given or arguments.checks:
        added.append(f"--nnodes={_nnodes(given, team)}")
    may_grow = team.open and _is_range(given)
    if len(team.nodes) == 1 and not may_grow and given.keys() <= _SETS_NO_MEETING:
        return added  # torchrun meets itself, on a port that is free
    backend = given.get("rdzv_backend") or ("static" if _wants_static(given) else "c10d")
    if backend == "static":
        return added + _static(given, team, environ)
    if "rdzv_backend" not in given:
        added.append(f"--rdzv-backend={backend}")
    if "rdzv_id" not in given:
        added.append(f"--rdzv-id={team.rendezvous_id}")
    return added + (_c10d(given, team, environ) if backend == "c10d" else [])


def _nnodes(given: Mapping[str, str], team: Team) -> str:
    """Return how many nodes torchrun is to train on: those that are to, or a range.

    A range goes up to those that are to, because torchrun would wait for more that do not come;
    where others may come it is as the user wrote it. The static rendezvous knows no range.
    """
    count = len(team.nodes)
    if not _is_range(given):
        return str(count)
    if team.open:
        return given["nnodes"]
    least, _ = node_range(given["nnodes"])
    return f"{least}:{count}" if least < count else str(count)


def _is_range(given: Mapping[str, str]) -> bool:
    """Tell whether the number of nodes may change while they train."""
    backend = given.get("rdzv_backend") or ("static" if _wants_static(given) else "c10d")
    least, most = node_range(given.get("nnodes", "1"))
    return least < most and backend != "static"


def _wants_static(given: Mapping[str, str]) -> bool:
    """Tell whether only options were given that torchrun heeds with its static rendezvous."""
    return "rdzv_endpoint" not in given and bool(
        {"node_rank", "master_addr", "master_port"} & given.keys()
    )


def _static(given: Mapping[str, str], team: Team, environ: Mapping[str, str]) -> list[str]:
    added = []
    if "node_rank" not in given or team.left_out:
        added.append(f"--node-rank={team.nodes.index(team.node)}")
    if "rdzv_endpoint" in given:
        return added + _moved_endpoint(given["rdzv_endpoint"], team)
    host, number = _meeting_point(given, team, environ)
    if host != given.get("master_addr"):
        added.append(f"--master-addr={host}")
    if "master_port" not in given:
        added.append(f"--master-port={number}")
    return added


def _c10d(given: Mapping[str, str], team: Team, environ: Mapping[str, str]) -> list[str]:
    if "rdzv_endpoint" in given:
        return _moved_endpoint(given["rdzv_endpoint"], team)
    host, number = _meeting_point(given, team, environ)
    added = [f"--rdzv-endpoint={bracketed(host)}:{number}"]
    if host == team.host and "rdzv_conf" not in given:
        # torchrun would compare names, which fails where a node is known by several.
        is_host = f"is_host={int(team.node == team.nodes[0])}"
        last_call = f",last_call_timeout={_LAST_CALL_S}" if _is_range(given) else ""
        added.append(f"--rdzv-conf={is_host}{last_call}")
    return added


def _meeting_point(
    given: Mapping[str, str], team: Team, environ: Mapping[str, str]
) -> tuple[str, str]:
    """Return host and port: as given, as in the variables that training scripts use, or ours."""
    host, number = master_address(given, environ)
    host = host or team.host
    return (team.host if _is_left_out(host, team) else host), number or str(team.port)


def _moved_endpoint(endpoint: str, team: Team) -> list[str]:
    """Return nothing, or the endpoint on a node that takes part where the user's does not."""
    host, number = host_and_port(endpoint)
    if not _is_left_out(host, team):
        return []
    return [f"--rdzv-endpoint={bracketed(team.host)}:{number or team.port}"]


def _is_left_out(host: str, team: Team) -> bool:
    return bool({host, host.partition(".")[0]} & set(team.left_out))
