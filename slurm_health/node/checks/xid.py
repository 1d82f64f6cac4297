# SPDX-License-Identifier: Apache-2.0
"""Xid and SXid errors: what NVIDIA's drivers wrote into the kernel's log of GPUs and NVSwitches."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.kernel_log import KERNEL_LOG, Message, read_messages
from slurm_health.node.rules.finding import Finding, Status, joined, node_fault, passed, warned
from slurm_health.node.rules.kernel_lines import ANY_XID, SXID, XID
from slurm_health.node.rules.xid import judge_sxid, judge_xid

_XID, _SXID = re.compile(XID), re.compile(SXID)

Numbers = tuple[Annotated[int, msgspec.Meta(ge=1, le=99_999)], ...]


class Xid(Check, frozen=True, kw_only=True):
    """The latest Xids and SXids, judged by NVIDIA's tables as the site has amended them."""

    SEEN = list[Message]
    TOGETHER = True
    LOOKS_AT = KERNEL_LOG
    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    fault: Numbers = ()
    warn: Numbers = ()
    ignore: Numbers = ()

    def collect(self, machine: CheckContext) -> list[Message]:
        """Read /dev/kmsg."""
        return read_messages(machine, ANY_XID, self.window_s)

    def judge(self, seen: list[Message]) -> Finding:
        """Judge each GPU's and NVSwitch's errors; a number counts once for each of them."""
        latest: dict[tuple[str, str, str], tuple[re.Match[str], Message]] = {}
        for message in seen:
            if found := _XID.search(message.text) or _SXID.search(message.text):
                latest[found["kind"], found["bus"], found["number"]] = found, message
        parts = [passed("", xids=len(latest))]
        for found, message in latest.values():
            status, text = self._status(found)
            device = "GPU" if found["kind"] == "Xid" else "NVSwitch"
            said = f"{device} {found['bus']}: {found['kind']} {found['number']}"
            said += f" {message.age_s:.0f} s ago ({text})"
            if status is Status.NODE_FAULT:
                parts.append(node_fault(said, xid=int(found["number"])))
            elif status is Status.WARN:
                parts.append(warned(said, xid=int(found["number"])))
        return joined(parts, well="no Xid or SXid that points to a fault of the node")

    def _status(self, found: re.Match[str]) -> tuple[Status, str]:
        number = int(found["number"])
        if number in self.ignore:
            return Status.PASS, ""
        if number in self.fault:
            return Status.NODE_FAULT, "configured as a fault"
        if number in self.warn:
            return Status.WARN, "configured as a warning"
        if found["kind"] == "Xid":
            return judge_xid(number)
        status, text = judge_sxid(number, fatal=found["word"] == "Fatal")
        return status, f"{found['text']}: {text}"
