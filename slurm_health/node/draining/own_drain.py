# SPDX-License-Identifier: Apache-2.0
"""A drain of our own: what this node remembers of it, and how it is lifted.

Only ours is lifted, only as we left it, and only where nothing else holds the node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_health.node.draining import RETURNED
from slurm_health.node.rules import drain_note
from slurm_health.node.rules.recovery import BootTime, DrainRecord, uptime_s
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import SlurmError

if TYPE_CHECKING:  # a health check loads this every time, and asks Slurm next to never
    from slurm_health.system.slurm.client import Client
    from slurm_health.system.slurm.parsing import Node

RECORD = "drained.json"
# Beside the record: who reads, records and drains this node holds it.
LOCK = "drain.lock"
LOCK_LIMIT_S = 20.0
# For what the next health check does where this one cannot.
_AGAIN_LIMIT_S = 5.0


@contextlib.contextmanager
def alone(state: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Keep this node's other hooks from draining, recording and releasing it meanwhile.

    Where `state` cannot be used nothing is recorded there either, and nobody is kept out.

    Raises:
        SharedStateUnusable: another has been at it for too long.
    """
    from slurm_health.node.draining.shared_state import held

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(held(state / LOCK, limit_s))
        yield


def remember(state: Path, record: DrainRecord) -> bool:
    """Keep the record of a drain in this node's own directory; tell whether that worked."""
    from slurm_health.system.private_files import publish

    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        publish(state / RECORD, msgspec.json.encode(record), mode=0o600)
    except OSError:
        return False
    return True


def amend(state: Path, before: DrainRecord, after: DrainRecord) -> None:
    """Keep what a hook has found out since it read the record, unless there is another by now."""
    from slurm_health.node.draining.shared_state import SharedStateUnusable

    with contextlib.suppress(SharedStateUnusable), alone(state, _AGAIN_LIMIT_S):
        if recall(state) == before:
            remember(state, after)


def recall(state: Path, node: str = "") -> DrainRecord | None:
    """Return the record; None when there is none, or it cannot be read: then we know of nothing.

    With `node`, one of another node is none: where nodes share a directory that each should have of
    its own, the passes of a node that is well would return one that is not.
    """
    try:
        record = from_json((state / RECORD).read_bytes(), DrainRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if node in {"", record.node} else None


def forget(state: Path) -> None:
    """Remove the record: the drain is over, or another's now."""
    with contextlib.suppress(OSError):
        (state / RECORD).unlink()


def look_after_drain(
    state: Path, name: str, controller: Client, now: BootTime | None
) -> Node | None:
    """Return how the node is that we drained; None where there is no drain of ours.

    A drain that a person has lifted is forgotten, and so is one whose note is another by now: it is
    theirs. The word of a person who lifts it is that the node is repaired, so what only tells of
    the past, as the kernel's log does, counts from now on.

    Raises:
        SlurmError: Slurm cannot be asked.
        SharedStateUnusable: another hook has been at it for too long.
    """
    from slurm_health.system.private_files import publish

    with alone(state, _AGAIN_LIMIT_S):
        kept = recall(state, name)
        if kept is None:
            return None
        node = controller.node(kept.node)
        if not node.out_of_pool:
            if kept.confirmed and now is not None:
                with contextlib.suppress(OSError):
                    publish(state / RETURNED, msgspec.json.encode(now), mode=0o600)
            forget(state)
        elif drain_note.unsigned(node.reason) != kept.reason:
            forget(state)
        return node


def returned_uptime_s(state: Path, now: BootTime | None) -> float:
    """Return when, of this boot, a person last returned this node; 0 for never."""
    try:
        then = from_json((state / RETURNED).read_bytes(), BootTime)
    except (OSError, msgspec.DecodeError):
        return 0.0
    return uptime_s(then, now) or 0.0


def release_own(site: Site, kept: DrainRecord, controller: Client) -> str:
    """Give this node back to the pool when it is still as we drained it; say what came of it."""
    from slurm_health.node.draining.shared_state import SharedStateUnusable

    try:
        with alone(site.state, _AGAIN_LIMIT_S):
            return _release_own(site, kept, controller)
    except (SlurmError, SharedStateUnusable) as err:
        return f"not released: {err}"


def _release_own(site: Site, kept: DrainRecord, controller: Client) -> str:
    from slurm_health.node import notify

    current = recall(site.state)
    if current is None or current.reason != kept.reason:
        return "not released: it was drained again meanwhile"
    now = controller.node(kept.node)
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
    count = "1 pass" if kept.passes == 1 else f"{kept.passes} passes"
    text = f"released after {count} of {', '.join(kept.retest)}"
    told_s = max(kept.passed_s, kept.time_s)
    released = notify.NodeEvent(
        kind=notify.EventKind.RELEASED, node=kept.node, time_s=told_s, text=text, checks=kept.retest
    )
    notify.send(site, released)
    return text


def undrain(controller: Client, now: Node) -> str:
    """Lift one drain and look whether it is lifted; return what went wrong, empty for nothing."""
    try:
        controller.undrain(now.name)
        after = controller.node(now.name)
    except SlurmError as err:
        return str(err)
    return f"it is still {after.state}" if after.drained else ""
