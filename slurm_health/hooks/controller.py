# SPDX-License-Identifier: Apache-2.0
"""What the hooks ask of slurmctld, only when there is something to act on. Each call has a limit.

A controller that is slow, silent or talks nonsense is an error here, never an empty answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

from slurm_health.core import drain_note
from slurm_health.errors import SlurmError
from slurm_health.slurm import command

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OUT = ("DRAIN", "DOWN", "FAIL", "MAINT", "REBOOT", "POWER", "INVAL", "FUTURE")
# Next to DRAIN these say that the node waits for something a passed check does not bring.
_UNRELEASABLE = ("DOWN", "FAIL", "MAINT", "REBOOT", "POWER", "INVAL", "FUTURE", "NOT_RESP")
_NAME = re.compile(r"^NodeName=(\S+)")
_STATE = re.compile(r"\sState=(\S+)")
_PARTITIONS = re.compile(r"\sPartitions=(\S+)")
# Up to who set it and when; fields may follow.
_SIGNED = re.compile(r".*?\[[^][@\s]+@[\dT:.+-]+\]")


class NodeNow(msgspec.Struct, frozen=True, kw_only=True):
    """A node as slurmctld sees it. `reason` carries who set it, and when."""

    name: str
    state: str
    reason: str
    partitions: tuple[str, ...]

    @property
    def flags(self) -> frozenset[str]:
        """The words of the state, without marks such as `*`."""
        return frozenset(word.rstrip("*~#!%$@^-") for word in self.state.split("+"))

    @property
    def out_of_pool(self) -> bool:
        """Whether somebody has taken it out of use, or is about to."""
        # Slurm writes a coming reboot, maintenance or power-down as a mark behind the word too.
        return any(mark in self.state for mark in "@^$~!%") or any(
            flag.startswith(_OUT) for flag in self.flags
        )

    @property
    def drained(self) -> bool:
        """Whether it takes no jobs because of a drain."""
        return "DRAIN" in self.flags

    @property
    def releasable(self) -> bool:
        """Whether lifting the drain is all it needs."""
        silent = any(mark in self.state for mark in "*$@^")
        return (
            self.drained
            and not silent
            and not any(flag.startswith(_UNRELEASABLE) for flag in self.flags)
        )


class Controller:
    """slurmctld, through scontrol."""

    def __init__(self, environ: Mapping[str, str], *, limit_s: float) -> None:
        kept = command.clean_environ(environ)
        self._environ = {**kept, "PATH": environ.get("PATH") or _PATH}
        self._limit_s = limit_s

    def nodes(self) -> dict[str, NodeNow]:
        """Read every node in one call.

        Raises:
            SlurmError: slurmctld does not answer, or what it answers cannot be read.
        """
        text = self._run("scontrol", "show", "nodes", "-o")
        found = {node.name: node for line in text.splitlines() if (node := _read(line))}
        if not found:
            raise SlurmError(f"scontrol show nodes answered {text[:80]!r}, expected nodes")
        return found

    def node(self, name: str) -> NodeNow:
        """Read one node.

        Raises:
            SlurmError: as `nodes`, or Slurm does not know it.
        """
        text = self._run("scontrol", "show", "node", "-o", name)
        found = _read(text.strip())
        if found is None or found.name != name:
            raise SlurmError(f"scontrol show node {name} answered {text[:80]!r}")
        return found

    def drain(self, name: str, reason: str) -> None:
        """Drain one node.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run("scontrol", "update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    def undrain(self, name: str) -> None:
        """Lift a drain, and nothing else: a node that is down stays down.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        self._run("scontrol", "update", f"NodeName={name}", "State=UNDRAIN")

    def _run(self, *argv: str) -> str:
        return command.run(argv, environ=self._environ, deadline_s=self._limit_s)


def _read(line: str) -> NodeNow | None:
    """Read one line of `scontrol show nodes -o`; None for one that is none.

    The note is free text and may hold what looks like fields, so fields are read before it only.
    """
    head, _, tail = line.partition(" Reason=")
    name, state, partitions = (field.search(head) for field in (_NAME, _STATE, _PARTITIONS))
    if name is None or state is None:
        return None
    signed = _SIGNED.match(tail)
    return NodeNow(
        name=name.group(1),
        state=state.group(1),
        reason=signed.group() if signed else tail.strip(),
        partitions=tuple(partitions.group(1).split(",")) if partitions else (),
    )


def members(nodes: Mapping[str, NodeNow], partitions: Collection[str]) -> dict[str, list[str]]:
    """Return the nodes of each of these partitions."""
    return {
        partition: [each.name for each in nodes.values() if partition in each.partitions]
        for partition in partitions
    }


def drained_by_us(nodes: Mapping[str, NodeNow]) -> list[str]:
    """Return the nodes that are out of the pool with a note of ours."""
    return [
        each.name for each in nodes.values() if each.out_of_pool and drain_note.is_ours(each.reason)
    ]
