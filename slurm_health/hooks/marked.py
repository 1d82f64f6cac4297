# SPDX-License-Identifier: Apache-2.0
"""Where marks are kept: one file per node in the directory all nodes share, root's alone."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from slurm_health.core import marks
from slurm_health.core.hook_settings import Breaker, Marks
from slurm_health.core.marks import Mark
from slurm_health.hooks.children import Answered, Broke, Hung, Outcome, run_one
from slurm_health.hooks.ledger import Untrusted, directory, locked, publish

_MARGIN_S = 3.0
_NODE = re.compile(r"[\w.-]+", re.ASCII)


def add(
    breaker: Breaker, node: str, mark: Mark, settings: Marks, *, owner: int = 0
) -> tuple[Mark, ...]:
    """Add a mark to a node's and return all that are alive.

    Raises:
        Untrusted: they cannot be kept; the mark is lost.
    """

    def work() -> bytes:
        place = _place(breaker, owner=owner, create=True)
        with locked(place, breaker.lock_limit_s):
            after = marks.add(_load(place / _name(node)), mark, settings)
            publish(place / _name(node), msgspec.json.encode(after))
        return msgspec.msgpack.encode(after)

    return msgspec.msgpack.decode(
        _answer(run_one(work, breaker.lock_limit_s + _MARGIN_S)), type=tuple[Mark, ...]
    )


def load(breaker: Breaker, node: str, *, owner: int = 0) -> tuple[Mark, ...]:
    """Return a node's marks, the old ones too.

    Raises:
        Untrusted: they cannot be read.
    """
    return _load(_place(breaker, owner=owner) / _name(node))


def marked_nodes(breaker: Breaker, *, owner: int = 0) -> list[str]:
    """Return the nodes that have a file of marks.

    Raises:
        Untrusted: the shared directory cannot be used.
    """
    place = _place(breaker, owner=owner)
    if not place.is_dir():
        return []
    return sorted(each.stem for each in place.glob("*.json"))


def clear(breaker: Breaker, node: str, *, owner: int = 0) -> None:
    """Forget a node's marks.

    Raises:
        Untrusted: the shared directory cannot be used.
    """
    (_place(breaker, owner=owner) / _name(node)).unlink(missing_ok=True)


def _place(breaker: Breaker, *, owner: int, create: bool = False) -> Path:
    place = directory(breaker, owner=owner) / "marks"
    if create:
        place.mkdir(mode=0o755, exist_ok=True)
    return place


def _name(node: str) -> str:
    if not _NODE.fullmatch(node) or node.startswith("."):
        raise Untrusted(f"{node!r} is no node's name")
    return f"{node}.json"


def _load(path: Path) -> tuple[Mark, ...]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Mark, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as err:
        raise Untrusted(f"{path} cannot be read: {err}") from err


def _answer(outcome: Outcome) -> bytes:
    match outcome:
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise Untrusted(reason)
        case Hung(limit_s=limit_s):
            raise Untrusted(f"the shared directory did not answer within {limit_s:g} s")
