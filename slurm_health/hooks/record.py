# SPDX-License-Identifier: Apache-2.0
"""What root keeps on a node about that node's own drain."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from slurm_health.core.recovery import DrainRecord
from slurm_health.hooks.ledger import publish

NAME = "drained.json"


def keep(state: Path, record: DrainRecord) -> bool:
    """Keep the record; tell whether that worked."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish(state / NAME, msgspec.json.encode(record))
    except OSError:
        return False
    return True


def load(state: Path) -> DrainRecord | None:
    """Return the record; None when there is none, or it cannot be read: then we know of nothing."""
    try:
        data = (state / NAME).read_bytes()
    except OSError:
        return None
    try:
        return msgspec.json.decode(data, type=DrainRecord)
    except msgspec.DecodeError:
        return None


def drop(state: Path) -> None:
    """Forget it: the drain is over, or another's now."""
    with contextlib.suppress(OSError):
        (state / NAME).unlink()
