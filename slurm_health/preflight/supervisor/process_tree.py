# SPDX-License-Identifier: Apache-2.0
"""A process with all that it has started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from slurm_health.system import proc

Tree = dict[int, proc.Stat]


def tree_of(pid: int, known: Mapping[int, proc.Stat] = MappingProxyType({})) -> Tree:
    """Return a process, those known from before that are still there, and the descendants of both.

    A process comes after its parent.
    """
    children: dict[int, list[proc.Stat]] = {}
    tree: Tree = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            process = proc.stat(directory)
            children.setdefault(process.parent, []).append(process)
            before = known.get(process.pid)
            # Another process may have the same number by now.
            if process.pid == pid or (before and before.start_ticks == process.start_ticks):
                tree[process.pid] = process
    queue = list(tree)
    while queue:
        for process in children.get(queue.pop(), ()):
            if process.pid not in tree:
                tree[process.pid] = process
                queue.append(process.pid)
    return tree
