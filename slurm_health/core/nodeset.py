# SPDX-License-Identifier: Apache-2.0
"""Node lists as people and Slurm write them: `gpu[01-04,7]` to names and back."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ClusterShell.NodeSet import NodeSet, NodeSetException

# What Slurm writes. ClusterShell's own operators (! & ^ @ and spaces) are not part of it.
_NODELIST = re.compile(r"[\w.,\[\]-]+", re.ASCII)


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the names a node list stands for, in its order.

    Raises:
        ValueError: the text is not a node list.
    """
    if not _NODELIST.fullmatch(nodelist):
        raise ValueError(f"cannot read {nodelist!r} as a node list")
    try:
        names = tuple(str(name) for name in NodeSet(nodelist, resolver=None))
    except NodeSetException as err:
        raise ValueError(f"cannot read {nodelist!r} as a node list: {err}") from err
    if not names:
        raise ValueError(f"cannot read {nodelist!r} as a node list: it names no node")
    return names


def fold(nodes: Iterable[str]) -> str:
    """Return the shortest node list that stands for `nodes`, empty for none."""
    return str(NodeSet.fromlist(list(nodes), resolver=None))
