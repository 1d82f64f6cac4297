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
from slurm_health.node.store import StoreUnusable, lock
from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import publish

# Beside the state: a hook that reads, records and drains this node holds it.
_LOCK = "drain.lock"
LOCK_LIMIT_S = 20.0
# For work that the next health check does if this one cannot.
AGAIN_LIMIT_S = 5.0


class NodeState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of this node about its own drains.

    Args:
        drained: the record of its drain, None if it is not drained.
        returned: when it was last repaired: nothing from before counts any longer.
        slurm: the drain that Slurm set by itself, or the processes that may lead to one.
        lifted_s: when a drain of Slurm's was last lifted here.
    """

    drained: DrainRecord | None = None
    returned: BootTime | None = None
    slurm: SlurmDrain | None = None
    lifted_s: float = 0.0


def load(state: Path) -> NodeState:
    """Return the state; an empty one if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return from_json((state / STATE_FILE).read_bytes(), NodeState)
    return NodeState()


def save(state: Path, **changes: object) -> bool:
    """Replace fields of the state; return whether that worked."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.json.encode(msgspec.structs.replace(load(state), **changes))
        publish(state / STATE_FILE, data, mode=0o600)
    except OSError:
        return False
    return True


def load_record(state: Path, node: str = "") -> DrainRecord | None:
    """Return the record of this node's drain; None if there is none, or it cannot be read.

    With `node`, a record of another node is none: if nodes share the directory that every node
    should have for itself, the passes of a healthy node would return a faulty one.
    """
    record = load(state).drained
    return record if record is None or node in {"", record.node} else None


def load_slurm(state: Path, node: str) -> SlurmDrain | None:
    """Return Slurm's own drain of this node, None without one."""
    own = load(state).slurm
    return own if own is not None and own.node == node else None


def returned_uptime_s(state: Path, now: BootTime | None) -> float:
    """Return the uptime at which this node was last returned to service; 0 for never."""
    return uptime_s(load(state).returned, now) or 0.0


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
            save(state, drained=after)
