# SPDX-License-Identifier: Apache-2.0
"""A partition as scontrol shows it: how many nodes it gives to one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_health.core.nodeset import expand


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition; `max_nodes` is None where a job may have them all.

    `names` are its nodes, none where Slurm names them in a way that cannot be read.
    """

    name: str
    is_default: bool
    nodes: int
    names: tuple[str, ...]
    max_nodes: int | None

    @property
    def room(self) -> int:
        """How many nodes it gives to one job at most."""
        return self.nodes if self.max_nodes is None else min(self.nodes, self.max_nodes)


def partition_of(fields: Mapping[str, str]) -> Partition:
    """Return the partition that `scontrol show partition` describes with these fields."""
    return Partition(
        name=fields.get("PartitionName", ""),
        is_default=fields.get("Default") == "YES",
        nodes=_count(fields.get("TotalNodes", "")) or 0,
        names=_names(fields.get("Nodes", "")),
        max_nodes=_count(fields.get("MaxNodes", "")),
    )


def _names(text: str) -> tuple[str, ...]:
    try:
        return expand(text) if text != "(null)" else ()
    except ValueError:
        return ()


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
