# SPDX-License-Identifier: Apache-2.0
"""The marks of all nodes, one file per node, in the shared directory: only root reads them."""

from __future__ import annotations

from slurm_health.node import shared
from slurm_health.node.rules import accusations
from slurm_health.node.rules.accusations import NodeMark
from slurm_health.node.site import Site
from slurm_health.node.state import drain_lock

MARKS = shared.NodeFiles("marks", tuple[NodeMark, ...], private=True)


def add(site: Site, node: str, mark: NodeMark) -> tuple[NodeMark, ...]:
    """Add a mark to this node's and return all that have not expired.

    Raises:
        StoreUnusable: they cannot be saved; the mark is lost.
    """

    def work() -> tuple[NodeMark, ...]:
        with drain_lock(site.state):
            known = MARKS.load(site.breaker).get(node, ())
            after = accusations.add(known, mark, site.accusations)
            MARKS.save(site.breaker, node, after)
        return after

    return shared.in_child(site, work, tuple[NodeMark, ...])
