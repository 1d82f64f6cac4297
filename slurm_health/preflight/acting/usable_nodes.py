# SPDX-License-Identifier: Apache-2.0
"""On which nodes a job may run at all: those of its partition with all that it asks for.

A job that needs more nodes than these, without those that it leaves, waits for ever.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job, Partition, nodes_of

log = logging.getLogger(__name__)

# Features of which each node must have all. What else a constraint may be is left to Slurm:
# `a|b`, `[rack1|rack2]`, `fast*2`, `(a&b)|c`.
_ALL_OF = re.compile(r"[\w.=+-]+(?:[&,][\w.=+-]+)*")
_AND = re.compile(r"[&,]")


class Usable(NamedTuple):
    """Nodes on which a job may run, of those in its partitions.

    `narrowed_by` are sbatch's options for which it may not run on the others.
    """

    nodes: frozenset[str]
    partition_nodes: frozenset[str]
    narrowed_by: tuple[str, ...] = ()


def usable_nodes(job: Job, partitions: Mapping[str, Partition], client: Client) -> Usable:
    """Return the nodes on which a job may run, whoever uses them now; none where unknown.

    What Slurm does not tell, or what is not understood, rules no node out.
    """
    chosen = [each for each in job.value("Partition").split(",") if each in partitions]
    inside = frozenset(node for each in chosen for node in partitions[each].names)
    options = {
        f"--constraint={job.value('Features')}": _with_features,
        f"--reservation={job.value('Reservation')}": _reserved,
    }
    usable = Usable(inside, inside)
    for option, narrowed in options.items():
        try:
            nodes = narrowed(option.partition("=")[2], usable.nodes, client)
        except SlurmError as err:
            log.warning("which nodes %s leaves is unknown: %s", option, err)
            continue
        # It runs on others: what it asks for is not what rules.
        if nodes < usable.nodes and nodes.issuperset(job.nodes):
            usable = Usable(nodes, inside, (*usable.narrowed_by, option))
    return usable


def _with_features(wanted: str, nodes: frozenset[str], client: Client) -> frozenset[str]:
    """Return the nodes that have these features, or could have them after a reboot."""
    if not nodes or not _ALL_OF.fullmatch(wanted):
        return nodes
    features = {*_AND.split(wanted)}
    found = client.nodes(sorted(nodes)).values()
    return frozenset(
        node.name for node in found if node.features is None or features.issubset(node.features)
    )


def _reserved(wanted: str, nodes: frozenset[str], client: Client) -> frozenset[str]:
    """Return the nodes of these reservations, if they are to stay those."""
    reserved: set[str] = set()
    for name in filter(None, wanted.split(",")):
        fields = client.reservation(name)
        if not _keeps_its_nodes(fields.get("Flags", "").split(",")):
            return nodes
        reserved |= {*nodes_of(fields.get("Nodes", ""))}
    return nodes & reserved if reserved else nodes


def _keeps_its_nodes(flags: list[str]) -> bool:
    """Tell whether a reservation has these nodes only, and no others for those that are drained.

    Slurm replaces nodes that it has chosen itself, and with FLEX a job may run on others too.
    """
    replaced = any(flag.startswith("REPLACE") for flag in flags)
    named = "SPEC_NODES" in flags and not replaced
    return "FLEX" not in flags and (named or "STATIC" in flags)
