# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a start meet, and which of them this is, as other schedulers say it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_health.records.errors import UsageError
from slurm_health.records.text import whole_number

# In this order. What trains reads the first of them too; the second is DLRover's.
_ADDRESSES = ("MASTER_ADDR", "DLROVER_MASTER_ADDR")
_RANKS = ("NODE_RANK", "GROUP_RANK")
_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Meeting:
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


def master(given: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return host and port of node 0 as options and variables say, empty where they do not.

    `given` are torchrun's options, which include its `PET_` variables; they come first.
    """
    named = (given.get("master_addr"), *(environ.get(name) for name in _ADDRESSES))
    host, port = host_and_port(next((text for text in named if text), ""))
    return host, given.get("master_port") or port or environ.get("MASTER_PORT", "")


def rank(given: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    """Return which node this is, as options and variables say; None where they do not."""
    named = (given.get("node_rank"), *(environ.get(name) for name in _RANKS))
    return next((text for text in named if text), None)


def meeting(given: Mapping[str, str], environ: Mapping[str, str], port: int) -> Meeting | None:
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
        host, number = master(given, environ)
    if not host:
        return None
    found = whole_number(number) if number else port
    if found is None or not 0 < found <= _MOST_PORT:
        raise UsageError(f"the port of node 0: expected 1 to {_MOST_PORT}, found {number!r}")
    return Meeting(host=host, port=found)
