# SPDX-License-Identifier: Apache-2.0
"""A drain of our own: what this node remembers of it, and how it is lifted.

Only ours is lifted, only as we left it, and only where nothing else holds the node.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.core.node import drain_note
from slurm_health.core.node.recovery import DrainRecord
from slurm_health.errors import SlurmError
from slurm_health.site_settings import Site

if TYPE_CHECKING:  # a health check loads this every time, and asks Slurm next to never
    from slurm_health.slurm.client import Client
    from slurm_health.slurm.parsing import Node

RECORD = "drained.json"
_RELEASED = "released.json"
_MOST_RELEASES = 100


def remember(state: Path, record: DrainRecord) -> bool:
    """Keep the record of a drain in this node's own directory; tell whether that worked."""
    return _keep(state, RECORD, msgspec.json.encode(record))


def _keep(state: Path, name: str, data: bytes) -> bool:
    from slurm_health.draining.shared_state import publish

    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish(state / name, data)
    except OSError:
        return False
    return True


def recall(state: Path) -> DrainRecord | None:
    """Return the record; None when there is none, or it cannot be read: then we know of nothing."""
    try:
        return msgspec.json.decode((state / RECORD).read_bytes(), type=DrainRecord)
    except (OSError, msgspec.DecodeError):
        return None


def forget(state: Path) -> None:
    """Remove the record: the drain is over, or another's now."""
    with contextlib.suppress(OSError):
        (state / RECORD).unlink()


def released_s(state: Path) -> tuple[float, ...]:
    """Return when this node was given back by itself, the latest last; nothing for what is lost."""
    try:
        return msgspec.json.decode((state / _RELEASED).read_bytes(), type=tuple[float, ...])
    except (OSError, msgspec.DecodeError):
        return ()


def release_own(site: Site, kept: DrainRecord, controller: Client, now_s: float) -> str:
    """Give this node back to the pool when it is still as we drained it; say what came of it."""
    try:
        now = controller.node(kept.node)
    except SlurmError as err:
        return f"not released: could not query Slurm: {err}"
    if not now.drained or drain_note.unsigned(now.reason) != kept.reason:
        forget(site.state)
        return f"the drain is no longer ours: {now.state}: {now.reason or '(no reason)'}"
    if not now.releasable:
        # Ask again after as many passes, not every time.
        remember(site.state, msgspec.structs.replace(kept, passes=0))
        return f"not released: it is {now.state}"
    why_not = undrain(controller, now)
    if why_not:
        return f"not released: {why_not}"
    forget(site.state)
    released = (*released_s(site.state), now_s)[-_MOST_RELEASES:]
    _keep(site.state, _RELEASED, msgspec.json.encode(released))
    return f"released after {kept.passes} passes of {', '.join(kept.retest)}"


def undrain(controller: Client, now: Node) -> str:
    """Lift one drain and look whether it is lifted; return what went wrong, empty for nothing."""
    try:
        controller.undrain(now.name)
        after = controller.node(now.name)
    except SlurmError as err:
        return str(err)
    return f"it is still {after.state}" if after.drained else ""
