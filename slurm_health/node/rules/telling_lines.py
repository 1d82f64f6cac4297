# SPDX-License-Identifier: Apache-2.0
"""Which lines of the kernel's log tell most, where there is room for few of them. Pure.

However much is said of one thing, it takes no room from another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from slurm_health.node.rules.finding import Status
from slurm_health.node.rules.kernel_lines import KINDS, LOST_GPU, LOST_GPU_NAMED, SXID, XID
from slurm_health.node.rules.xid import judge_sxid, judge_xid

_XID, _SXID = re.compile(XID), re.compile(SXID)
_LOST_GPU = re.compile(LOST_GPU), re.compile(LOST_GPU_NAMED)
_KINDS = [(re.compile(each.pattern), each.status) for each in KINDS]


def most_telling(lines: Sequence[str], most: int) -> tuple[str, ...]:
    """Return so many lines at most, in their order.

    The latest of each kind comes before a second one of any, and a fault before the rest. Lines on
    a GPU or an NVSwitch are a kind by its address, the error's number and how bad they are.
    """
    if len(lines) <= most:
        return tuple(lines)
    counts: Counter[tuple[object, ...]] = Counter()
    ranked = []
    for place in reversed(range(len(lines))):
        status, *kind = _kind(lines[place])
        ranked.append((counts[*kind], status is not Status.NODE_FAULT, -place))
        counts[*kind] += 1
    return tuple(lines[place] for place in sorted(-each[2] for each in sorted(ranked)[:most]))


def _kind(line: str) -> tuple[object, ...]:
    """Return how bad a line is and, with that, of which kind."""
    if xid := _XID.match(line):
        number = int(xid["number"])
        status, _ = judge_xid(number, xid["text"])
        return status, xid["kind"], xid["bus"], number, status
    if sxid := _SXID.match(line):
        number = int(sxid["number"])
        fatal = {"Fatal": True, "Non-fatal": False}.get(sxid["word"] or "")
        status, _ = judge_sxid(number, fatal=fatal)
        return status, sxid["kind"], sxid["bus"], number, status
    for pattern in _LOST_GPU:
        if lost := pattern.match(line):
            return Status.NODE_FAULT, pattern, lost["bus"]
    found = ((status, pattern) for pattern, status in _KINDS if pattern.match(line))
    return next(found, (Status.PASS, ""))
