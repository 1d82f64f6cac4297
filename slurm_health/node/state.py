# SPDX-License-Identifier: Apache-2.0
"""What a node keeps about its own drains, in root's directory on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slurm_health.node import STATE_FILE
from slurm_health.node.rules.recovery import BootTime, DrainRecord, uptime_s
from slurm_health.node.store import Store, StoreUnusable, lock

# Beside the state: a hook that reads, records and drains this node holds it.
_LOCK = "drain.lock"
LOCK_LIMIT_S = 20.0
# For what the next health check does if this one cannot.
AGAIN_LIMIT_S = 5.0


class NodeState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node keeps about its own drains.

    Args:
        drained: what it is drained for, None if it is not.
        returned: when an administrator last returned it to service after a drain of ours.
    """

    drained: DrainRecord | None = None
    returned: BootTime | None = None


def _store(state: Path) -> Store[NodeState]:
    return Store(state / STATE_FILE, NodeState)


def _load(state: Path) -> NodeState:
    """Return the state; an empty one if there is none, or it cannot be read."""
    try:
        return _store(state).load() or NodeState()
    except StoreUnusable:
        return NodeState()


def recall(state: Path, node: str = "") -> DrainRecord | None:
    """Return what this node is drained for; None if it is not, or that cannot be read.

    With `node`, a record of another node is none: if nodes share a directory that each should have
    of its own, the passes of a healthy node would return a faulty one.
    """
    record = _load(state).drained
    return record if record is None or node in {"", record.node} else None


def remember(state: Path, record: DrainRecord) -> bool:
    """Keep what this node is drained for; return whether that could be done."""
    return _save(state, msgspec.structs.replace(_load(state), drained=record))


def forget(state: Path) -> None:
    """Delete it: the drain is over, or another's now."""
    _save(state, msgspec.structs.replace(_load(state), drained=None))


def keep_return(state: Path, now: BootTime | None) -> None:
    """Keep that what happened before now counts no more: the node was repaired."""
    if now is not None:
        _save(state, msgspec.structs.replace(_load(state), returned=now))


def returned_uptime_s(state: Path, now: BootTime | None) -> float:
    """Return when, of this boot, this node was last returned to service; 0 for never."""
    return uptime_s(_load(state).returned, now) or 0.0


def _save(state: Path, value: NodeState) -> bool:
    try:
        _store(state).save(value)
    except StoreUnusable:
        return False
    return True


@contextlib.contextmanager
def alone(state: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Keep this node's other hooks from draining, recording and releasing it meanwhile.

    If `state` cannot be used nothing is recorded there either, and no hook is kept out.

    Raises:
        StoreUnusable: another has been at it for too long.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / _LOCK).touch(mode=0o600)
    except OSError:
        yield
        return
    with lock(state / _LOCK, limit_s):
        yield


def amend(state: Path, before: DrainRecord, after: DrainRecord) -> None:
    """Keep what a hook has learnt since it read the record, unless there is another by now."""
    with contextlib.suppress(StoreUnusable), alone(state, AGAIN_LIMIT_S):
        if recall(state) == before:
            remember(state, after)
