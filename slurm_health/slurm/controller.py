# SPDX-License-Identifier: Apache-2.0
"""What the hooks ask of slurmctld, only when there is something to act on. Each call has a limit.

A controller that is slow, silent or talks nonsense is an error here, never an empty answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from slurm_health.core.node import drain_note
from slurm_health.slurm import command
from slurm_health.slurm.parsing import Node
from slurm_health.slurm.reads import Reads
from slurm_health.slurm.reads_choice import choose

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Controller:
    """slurmctld, as the hooks ask it."""

    def __init__(self, environ: Mapping[str, str], *, limit_s: float) -> None:
        kept = command.clean_environ(environ)
        self._environ = {**kept, "PATH": environ.get("PATH") or _PATH}
        self._limit_s = limit_s

    @cached_property
    def _reads(self) -> Reads:
        return choose(lambda argv: self._run(*argv)).reads

    def nodes(self) -> dict[str, Node]:
        """Read every node in one call.

        Raises:
            SlurmError: slurmctld does not answer, or what it answers cannot be read.
        """
        return self._reads.nodes([])

    def node(self, name: str) -> Node:
        """Read one node.

        Raises:
            SlurmError: as `nodes`, or Slurm does not know it.
        """
        return self._reads.nodes([name])[name]

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


def members(nodes: Mapping[str, Node], partitions: Collection[str]) -> dict[str, list[str]]:
    """Return the nodes of each of these partitions."""
    return {
        partition: [each.name for each in nodes.values() if partition in each.partitions]
        for partition in partitions
    }


def drained_by_us(nodes: Mapping[str, Node]) -> list[str]:
    """Return the nodes that are out of the pool with a note of ours."""
    return [
        each.name for each in nodes.values() if each.out_of_pool and drain_note.is_ours(each.reason)
    ]
