# SPDX-License-Identifier: Apache-2.0
"""Node lists as people and Slurm write them: `gpu[01-04,7]` to names and back.

ClusterShell is loaded at the first use: a hook on a healthy node does without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

# What Slurm writes. ClusterShell's own operators (! & ^ @ and spaces) are not part of it.
_NODELIST = re.compile(r"[\w.,\[\]-]+", re.ASCII)
_NAMES = re.compile(r"(?:[^,\[]|\[[^]]*\]?)+")
_BRACKETS = re.compile(r"\[([^]]*)\]")
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)
# Slurm 22.05 takes the range n[1-65536] and refuses a longer one; here it bounds the whole list.
_MOST_NAMES = 64 * 1024


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the names a node list stands for, in its order.

    Raises:
        ValueError: the text is not a node list.
    """
    if not _NODELIST.fullmatch(nodelist):
        raise ValueError(f"cannot read {nodelist!r} as a node list")
    if sum(map(_count, _NAMES.findall(nodelist))) > _MOST_NAMES:
        raise ValueError(f"cannot read {nodelist!r} as a node list: more than {_MOST_NAMES} nodes")
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        names = tuple(str(name) for name in NodeSet(nodelist, resolver=None))
    except NodeSetException as err:
        raise ValueError(f"cannot read {nodelist!r} as a node list: {err}") from err
    if not names:
        raise ValueError(f"cannot read {nodelist!r} as a node list: it names no node")
    return names


def _count(name: str) -> int:
    """Return how many nodes a name with brackets stands for, more or less."""
    return prod(sum(map(_span, each.split(","))) for each in _BRACKETS.findall(name))


def _span(numbers: str) -> int:
    found = _RANGE.fullmatch(numbers)
    return max(int(found[2]) - int(found[1]) + 1, 1) if found else 1


def fold(nodes: Iterable[str]) -> str:
    """Return a short node list that stands for `nodes` and that Slurm can read, empty for none.

    Slurm 22.05 refuses brackets that are followed by text, as in `n[1-2]-ib` or
    `r[1-2]n3`, so only a number at the end of a name is folded.
    """
    names = list(dict.fromkeys(nodes))
    if len(names) <= 1:
        return "".join(names)
    from ClusterShell.NodeSet import NodeSet
    from ClusterShell.RangeSet import AUTOSTEP_DISABLED

    numbered: list[str] = []
    plain: list[str] = []
    for name in names:
        (numbered if name[-1:].isdigit() else plain).append(name)
    # Explicit, because a ClusterShell of the site's may be configured to fold in other ways.
    folded = NodeSet.fromlist(numbered, resolver=None, autostep=AUTOSTEP_DISABLED)
    folded.fold_axis = (-1,)
    return ",".join([*([str(folded)] if numbered else []), *sorted(plain)])
