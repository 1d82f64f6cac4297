# SPDX-License-Identifier: Apache-2.0
"""When a node that a hook drained may be resumed. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from slurm_health.node.rules.settings import Recovery


class BootTime(msgspec.Struct, frozen=True, kw_only=True):
    """A moment by the clock that the kernel starts at every boot, and that is never set."""

    boot: str
    uptime_s: float


class DrainRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node was drained for, kept on the node by root.

    Args:
        node: its name.
        reason: the note exactly as it was set; with any other note the drain is not ours.
        retest: the checks that failed; empty if no check can clear the node, and an administrator
            releases it.
        time_s: when.
        expected: variables of the job's environment that the checks depended on.
        passes: fresh passes in a row since.
        passed_s: when the last of them was.
        measured: when the fault was measured, by the kernel's clock; None if that is unknown.
        confirmed: Slurm showed the node out of the pool. The record is written before the drain,
            and a drain may fail.
    """

    node: str
    reason: str
    retest: tuple[str, ...]
    time_s: float
    expected: dict[str, str] = {}
    passes: int = 0
    passed_s: float = 0.0
    measured: BootTime | None = None
    confirmed: bool = False


_Record = TypeVar("_Record", bound=DrainRecord)


def uptime_s(then: BootTime | None, now: BootTime | None) -> float | None:
    """Return the uptime of a moment in the boot of `now`; None for one of another boot."""
    same = then is not None and now is not None and then.boot == now.boot
    return then.uptime_s if then is not None and same else None


def after_test(record: _Record, *, all_passed: bool, now_s: float, settings: Recovery) -> _Record:
    """Return the record after its checks ran once more.

    A pass counts only if it is apart from the last one and from the drain. Any other result begins
    the count anew. The count ends at the passes that the site wants.
    """
    if not all_passed:
        return msgspec.structs.replace(record, passes=0, passed_s=0.0)
    last_s = max(record.passed_s, record.time_s)
    # A clock that was set back must not hold the node for ever, nor resume it at once.
    if now_s < last_s:
        return msgspec.structs.replace(record, passed_s=now_s, time_s=min(record.time_s, now_s))
    if now_s - last_s < settings.apart_s:
        return record
    passes = min(record.passes + 1, settings.passes)
    return msgspec.structs.replace(record, passes=passes, passed_s=now_s)


def is_due(record: DrainRecord, settings: Recovery) -> bool:
    """Return whether the node has enough passes to be resumed."""
    return 0 < settings.passes <= record.passes and bool(record.retest)
