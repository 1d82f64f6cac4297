# SPDX-License-Identifier: Apache-2.0
"""The marks of all nodes, one file per node, in the shared directory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from slurm_health.node import shared
from slurm_health.node.rules import accusations
from slurm_health.node.rules.accusations import NodeMark
from slurm_health.node.rules.settings import Breaker
from slurm_health.node.shared import StoreForRoot, StoreUnusable
from slurm_health.node.site import Site
from slurm_health.node.state import drain_lock
from slurm_health.node.store import Store

_MARKS = "marks"
_NODE = re.compile(r"[\w-][\w.-]*", re.ASCII)


def _marks(directory: Path, node: str) -> Store[tuple[NodeMark, ...]]:
    if not _NODE.fullmatch(node):
        raise StoreUnusable(f"{node!r} is not the name of a node")
    return Store(directory / _MARKS / f"{node}.json", tuple[NodeMark, ...])


def add(site: Site, node: str, mark: NodeMark) -> tuple[NodeMark, ...]:
    """Add a mark to this node's and return all that have not expired.

    Raises:
        StoreUnusable: they cannot be saved; the mark is lost.
    """

    def work() -> tuple[NodeMark, ...]:
        store = _marks(shared.directory(site.breaker), node)
        with drain_lock(site.state):
            after = accusations.add(store.load() or (), mark, site.accusations)
            store.save(after)
        return after

    return shared.in_child(site, work, tuple[NodeMark, ...])


def of_node(settings: Breaker, node: str) -> tuple[NodeMark, ...]:
    """Return a node's marks, expired ones too.

    Raises:
        StoreUnusable: they cannot be read.
    """
    return _marks(shared.directory(settings), node).load() or ()


def marked_nodes(settings: Breaker) -> list[str]:
    """Return the nodes that have a file of marks.

    Raises:
        StoreUnusable: the shared directory cannot be used.
    """
    path = shared.directory(settings) / _MARKS
    try:
        return sorted(file.stem for file in path.iterdir() if file.suffix == ".json")
    except FileNotFoundError:
        return []
    except PermissionError as err:
        raise StoreForRoot(f"{path}: only root can read and remove what is there") from err
    except OSError as err:
        raise StoreUnusable(f"{path}: {err.strerror}") from err


def delete(settings: Breaker, node: str) -> None:
    """Remove a node's marks.

    Raises:
        StoreUnusable: the shared directory cannot be used.
    """
    _marks(shared.directory(settings), node).delete()


def why_not_removable(settings: Breaker, node: str) -> str:
    """Return why this user cannot remove a node's marks; empty if they can.

    Raises:
        StoreUnusable: the shared directory cannot be used.
    """
    path = _marks(shared.directory(settings), node).path.parent
    if not path.exists() or os.access(path, os.W_OK | os.X_OK):
        return ""
    return f"only root can read and remove what is in {path}"
