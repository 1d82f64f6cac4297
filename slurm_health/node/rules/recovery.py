# SPDX-License-Identifier: Apache-2.0
"""When a node that a hook drained may come back: pure."""

from __future__ import annotations

import msgspec

from slurm_health.node.rules.settings import Recovery


class BootTime(msgspec.Struct, frozen=True, kw_only=True):
    """A moment by the clock that the kernel began when it was started, which nobody sets."""

    boot: str
    uptime_s: float


class DrainRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node was drained for, kept on the node by root.

    Args:
        node: its name.
        reason: the note exactly as it was set; another one is another's.
        retest: the checks that failed; empty when none did and only a person can tell.
        time_s: when.
        expected: what the checks that failed went by beside the site's file: variables of the job.
            A test without them is another test.
        passes: how many fresh passes in a row there have been since.
        passed_s: when the last of them was.
        found: when the fault was found, by the kernel's clock; None where that is not known.
        confirmed: whether the node was seen to be out of the pool. It is recorded before it is
            drained, and a drain may fail.
    """

    node: str
    reason: str
    retest: tuple[str, ...]
    time_s: float
    expected: dict[str, str] = {}
    passes: int = 0
    passed_s: float = 0.0
    found: BootTime | None = None
    confirmed: bool = False


def uptime_s(then: BootTime | None, now: BootTime | None) -> float | None:
    """Return when a moment was, of the boot that there is now; None for one of another boot."""
    same = then is not None and now is not None and then.boot == now.boot
    return then.uptime_s if then is not None and same else None


def after_test(
    record: DrainRecord, *, all_passed: bool, now_s: float, settings: Recovery
) -> DrainRecord:
    """Return the record after its checks ran once more.

    A pass counts only when it is apart from the one before and from the drain; anything but a
    pass of every check begins the count anew. Nobody counts further than there is need.
    """
    if not all_passed:
        return msgspec.structs.replace(record, passes=0, passed_s=0.0)
    last_s = max(record.passed_s, record.time_s)
    # A clock that was set back must not hold the node for ever, nor bring it back at once.
    if now_s < last_s:
        return msgspec.structs.replace(record, passed_s=now_s, time_s=min(record.time_s, now_s))
    if now_s - last_s < settings.apart_s:
        return record
    passes = min(record.passes + 1, settings.passes)
    return msgspec.structs.replace(record, passes=passes, passed_s=now_s)


def is_due(record: DrainRecord, settings: Recovery) -> bool:
    """Tell whether enough passes have been seen to give the node back."""
    return 0 < settings.passes <= record.passes and bool(record.retest)
