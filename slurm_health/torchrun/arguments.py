# SPDX-License-Identifier: Apache-2.0
"""What torchrun gets beside what the user wrote: node counts, ranks and the rendezvous. Pure.

Where node 0 is, and which node this is, is read here too, as other schedulers say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from slurm_health.preflight.chosen_probes import what_to_check
from slurm_health.preflight.decide.policy import OnHang
from slurm_health.records.errors import UsageError
from slurm_health.records.text import whole_number

# In this order. What trains reads the first of them too; the second is DLRover's.
_ADDRESSES = ("MASTER_ADDR", "DLROVER_MASTER_ADDR")
_RANKS = ("NODE_RANK", "GROUP_RANK")
_MOST_PORT = 65535
CHECKS = ("network_check", "straggler_detection")  # which may be asked for
_CHECKING = {*CHECKS, "exclude_straggler"}


@dataclass(frozen=True, kw_only=True)
class NodeZeroAddress:
    """Host and port of node 0, as the others reach it."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """The same in one word."""
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def beside(self) -> NodeZeroAddress:
        """The next port of the same host."""
        return replace(self, port=self.port + (1 if self.port < _MOST_PORT else -1))


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

    Args:
        given: torchrun's options.
        environ: this process's environment.
        port: which port it is where nothing says it.

    Raises:
        UsageError: what stands for the port is none.
    """
    host, number = host_and_port(given.get("rdzv_endpoint", ""))
    if not host:
        host, number = master_address(given, environ)
    if not host:
        return None
    port_number = whole_number(number) if number else port
    if port_number is None or not 0 < port_number <= _MOST_PORT:
        raise UsageError(f"the port of node 0: expected 1 to {_MOST_PORT}, found {number!r}")
    return NodeZeroAddress(host=host, port=port_number)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many nodes training may start with."""

    least: int
    most: int

    @property
    def text(self) -> str:
        """The same as --nnodes would say it."""
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


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
    def nnodes(self) -> Bounds | None:
        """The nodes that `N` or `MIN:MAX` allows, None if neither is given.

        Raises:
            UsageError: it is neither.
        """
        if (text := self.given.get("nnodes")) is None:
            return None
        least, colon, most = text.partition(":")
        try:
            bounds = Bounds(least=int(least), most=int(most if colon else least))
        except ValueError:
            bounds = Bounds(least=0, most=0)
        if not 0 < bounds.least <= bounds.most:
            raise UsageError(f"--nnodes: expected N or MIN:MAX, found {text!r}")
        return bounds

    @property
    def trains_alone(self) -> bool:
        """Whether each process trains for itself, on one node."""
        return self.standalone or (self.nnodes is not None and self.nnodes.most == 1)

    @property
    def meets_by_itself(self) -> bool:
        """Whether the nodes meet on one of them, and their order does not matter."""
        return self.given.get("rdzv_backend", "c10d") == "c10d"

    @property
    def checks(self) -> bool:
        """Whether the nodes are to be checked first."""
        return not self.own.keys().isdisjoint(_CHECKING)

    @property
    def max_restarts(self) -> int:
        """How often workers that have failed may be started again."""
        return whole_number(self.given.get("max_restarts", "")) or 0

    @property
    def on_hang(self) -> str:
        """What is to be done about a hang."""
        return self.text("monitor") or OnHang.REPORT.value

    @property
    def check(self) -> str:
        """What is checked, as `--check` of the other commands would say it."""
        return what_to_check(self.own) if "straggler_detection" in self.own else "network-check"
