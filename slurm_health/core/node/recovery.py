# SPDX-License-Identifier: Apache-2.0
"""When a node that a hook drained may come back: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from slurm_health.core.node.settings import Recovery

_DAY_S = 86400.0
# What Slurm counts on this node to have. A check that fails because of it passes without it.
_EXPECTED = ("SLURM_JOB_GPUS", "SLURM_JOB_PARTITION")


class DrainRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What this node was drained for, kept on the node by root.

    Args:
        node: its name.
        reason: the note exactly as it was set; another one is another's.
        retest: the checks that failed; empty when none did and only a person can tell.
        expected: what Slurm said then of the job that was to have the node, for the same checks.
        time_s: when.
        passes: how many fresh passes in a row there have been since.
        passed_s: when the last of them was.
    """

    node: str
    reason: str
    retest: tuple[str, ...]
    time_s: float
    passes: int = 0
    passed_s: float = 0.0
    expected: dict[str, str] = {}


def expected(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of a hook's environment the checks must know when they are repeated."""
    return {name: environ[name] for name in _EXPECTED if name in environ}


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
    return settings.release and bool(record.retest) and record.passes >= settings.passes


def needs_person(record: DrainRecord, released_s: Sequence[float], settings: Recovery) -> bool:
    """Tell whether the node came back by itself too often in the day before its drain."""
    before_s = [each for each in released_s if 0 <= record.time_s - each <= _DAY_S]
    return len(before_s) >= settings.per_day
