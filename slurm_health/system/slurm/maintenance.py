# SPDX-License-Identifier: Apache-2.0
"""What root does in Slurm to a node that is being mended: reboots it, and keeps it for itself."""

from __future__ import annotations

from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import nodes_of


class Maintenance(Client):
    """Slurm's commands for that. What raises, raises as `Client` does."""

    def reboot(self, node: str, reason: str) -> None:
        """Reboot a node that is drained, and keep it drained with this reason.

        Without ASAP and nextstate: seen on 22.05, with either of them the node is back in the pool
        as soon as it is up, before anything has checked it, and its reason is gone.
        """
        self._run("scontrol", "reboot", f"reason={reason}", node)

    def reserve(self, name: str, node: str) -> None:
        """Keep a node for jobs of root, until the reservation is deleted."""
        self._run(
            "scontrol",
            "create",
            "reservation",
            f"ReservationName={name}",
            f"Nodes={node}",
            "StartTime=now",
            "Duration=UNLIMITED",
            "Users=root",
            "Flags=MAINT,IGNORE_JOBS",
        )

    def is_reserved(self, name: str, node: str) -> bool:
        """Tell whether there is this reservation, and it has the node."""
        return node in nodes_of(self.reservation(name).get("Nodes", ""))

    def delete_reservation(self, name: str) -> None:
        """Let jobs of others have the node again."""
        self._run("scontrol", "delete", f"ReservationName={name}")
