# SPDX-License-Identifier: Apache-2.0
"""Xid errors: what the NVIDIA driver wrote into the kernel's log about its GPUs."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from slurm_health.checks.check import Check, CheckContext
from slurm_health.checks.kernel_log import Message, read_messages
from slurm_health.core.node.finding import Finding, Status, joined, node_fault, passed, warned
from slurm_health.core.node.xid import judge_xid

# NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has fallen off the bus.
_XID = re.compile(r"^NVRM: Xid \((?:PCI:)?([\w:.]+)\): (\d+)")

Numbers = tuple[Annotated[int, msgspec.Meta(ge=1, le=999)], ...]


class Xid(Check, frozen=True, kw_only=True):
    """The latest Xids, judged by NVIDIA's catalogue as the site has amended it."""

    SEEN = list[Message]
    TOGETHER = True
    COMPONENTS = ("node", "compute", "memory", "links", "network")

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    fault: Numbers = ()
    warn: Numbers = ()
    ignore: Numbers = ()

    def collect(self, machine: CheckContext) -> list[Message]:
        """Read /dev/kmsg."""
        return read_messages(machine, _XID.pattern, self.window_s)

    def judge(self, seen: list[Message]) -> Finding:
        """Judge each GPU's Xids; a number counts once for each GPU."""
        latest: dict[tuple[str, int], Message] = {}
        for message in seen:
            if found := _XID.search(message.text):
                latest[found.group(1), int(found.group(2))] = message
        parts = [passed("", xids=len(latest))]
        for (bus, number), message in latest.items():
            status, text = self._status(number)
            said = f"GPU {bus}: Xid {number} {message.age_s:.0f} s ago ({text})"
            if status is Status.NODE_FAULT:
                parts.append(node_fault(said, xid=number))
            elif status is Status.WARN:
                parts.append(warned(said, xid=number))
        return joined(parts, well="no Xid that points to a fault of the node")

    def _status(self, number: int) -> tuple[Status, str]:
        if number in self.ignore:
            return Status.PASS, ""
        if number in self.fault:
            return Status.NODE_FAULT, "configured as a fault"
        if number in self.warn:
            return Status.WARN, "configured as a warning"
        return judge_xid(number)
