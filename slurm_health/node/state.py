# SPDX-License-Identifier: Apache-2.0
"""The state of a node about its own drains, in root's directory on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slurm_health.node import STATE_FILE
from slurm_health.node.rules.recovery import BootTime, DrainRecord, uptime_s
from slurm_health.node.rules.slurm_drain import SlurmDrain
from slurm_health.node.store import Store, StoreUnusable, lock

# Beside the state: a hook that reads, records and drains this node holds it.
_LOCK = "drain.lock"
LOCK_LIMIT_S = 20.0
# For work that the next health check does if this one cannot.
AGAIN_LIMIT_S = 5.0
_MOST_LIFTS = 8


class NodeState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of this node about its own drains.

    Args:
        drained: the record of its drain, None if it is not drained.
        returned: when an administrator last returned it to service after a drain of ours.
        slurm: the drain that Slurm set by itself, or the processes that may lead to one.
        lifts_s: when drains of Slurm's were lifted here.
    """

    drained: DrainRecord | None = None
    returned: BootTime | None = None
    slurm: SlurmDrain | None = None
    lifts_s: tuple[float, ...] = ()


def _store(state: Path) -> Store[NodeState]:
    return Store(state / STATE_FILE, NodeState)


def _load(state: Path) -> NodeState:
    """Return the state; an empty one if there is none, or it cannot be read."""
    try:
        return _store(state).load() or NodeState()
    except StoreUnusable:
        return NodeState()


def load_record(state: Path, node: str = "") -> DrainRecord | None:
    """Return the record of this node's drain; None if there is none, or it cannot be read.

    With `node`, a record of another node is none: if nodes share the directory that every node
    should have for itself, the passes of a healthy node would return a faulty one.
    """
    record = _load(state).drained
    return record if record is None or node in {"", record.node} else None


def save_record(state: Path, record: DrainRecord) -> bool:
    """Save the record of this node's drain; return whether that worked."""
    return _save(state, msgspec.structs.replace(_load(state), drained=record))


def delete_record(state: Path) -> None:
    """Delete the record: the drain is over, or another's now."""
    _save(state, msgspec.structs.replace(_load(state), drained=None))


def load_slurm(state: Path, node: str) -> tuple[SlurmDrain | None, tuple[float, ...]]:
    """Return Slurm's own drain of this node, None without one, and when such were lifted here."""
    value = _load(state)
    own = value.slurm if value.slurm is not None and value.slurm.node == node else None
    return own, value.lifts_s


def save_slurm(state: Path, record: SlurmDrain | None, *lifted_s: float) -> bool:
    """Save Slurm's own drain of this node, None for none, and that one was lifted."""
    value = _load(state)
    lifts_s = (*value.lifts_s, *lifted_s)[-_MOST_LIFTS:]
    return _save(state, msgspec.structs.replace(value, slurm=record, lifts_s=lifts_s))


def save_return(state: Path, now: BootTime | None) -> None:
    """Save that the node was repaired: nothing from before now counts any longer."""
    if now is not None:
        _save(state, msgspec.structs.replace(_load(state), returned=now))


def returned_uptime_s(state: Path, now: BootTime | None) -> float:
    """Return the uptime at which this node was last returned to service; 0 for never."""
    return uptime_s(_load(state).returned, now) or 0.0


def _save(state: Path, value: NodeState) -> bool:
    try:
        _store(state).save(value)
    except StoreUnusable:
        return False
    return True


@contextlib.contextmanager
def drain_lock(state: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Keep this node's other hooks from draining, recording and releasing it meanwhile.

    If `state` cannot be used nothing is recorded there either, and no hook is kept out.

    Raises:
        StoreUnusable: another hook has held the lock for longer than `limit_s`.
    """
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / _LOCK).touch(mode=0o600)
    except OSError:
        yield
        return
    with lock(state / _LOCK, limit_s):
        yield


def replace_record(state: Path, before: DrainRecord, after: DrainRecord) -> None:
    """Replace a record, unless another hook has replaced it since."""
    with contextlib.suppress(StoreUnusable), drain_lock(state, AGAIN_LIMIT_S):
        if load_record(state) == before:
            save_record(state, after)
