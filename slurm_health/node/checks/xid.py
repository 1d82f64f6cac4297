# SPDX-License-Identifier: Apache-2.0
"""Xid and SXid errors: what NVIDIA's drivers wrote into the kernel's log of GPUs and NVSwitches."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

import msgspec

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.kernel_log import KERNEL_LOG, Message, read_messages
from slurm_health.node.rules.finding import (
    Finding,
    Status,
    joined,
    mended_by,
    node_fault,
    passed,
    warned,
)
from slurm_health.node.rules.kernel_lines import ANY_XID, LOST_GPU, LOST_GPU_NAMED, SXID, XID
from slurm_health.node.rules.xid import fatal_link, judge_sxid, judge_xid, remedy_of

_XID, _SXID = re.compile(XID), re.compile(SXID)
_LOST_GPU, _LOST_GPU_NAMED = re.compile(LOST_GPU), re.compile(LOST_GPU_NAMED)
_LOST = 79  # the Xid of a GPU that has fallen off the bus
_OF_A_LINK = 74

Numbers = tuple[Annotated[int, msgspec.Meta(ge=1, le=99_999)], ...]


class _Error(NamedTuple):
    """An error of a device; `word` is how severe an NVSwitch's is, empty where it is not told."""

    kind: str
    bus: str
    number: int
    word: str
    text: str
    age_s: float


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
    fatal_link_drains: bool = False

    def collect(self, machine: CheckContext) -> list[Message]:
        """Read /dev/kmsg."""
        return read_messages(machine, ANY_XID, self.window_s)

    def judge(self, seen: list[Message]) -> Finding:
        """Judge each GPU's and NVSwitch's errors; a number counts once for each of them."""
        latest = self._latest(seen)
        parts = [passed("", xids=len(latest))]
        for error in latest:
            status, text = self._status(error)
            device = "GPU" if error.kind == "Xid" else "NVSwitch"
            said = f"{device} {error.bus}: {error.kind} {error.number}"
            said += f" {error.age_s:.0f} s ago ({text})"
            if status is Status.NODE_FAULT:
                found = node_fault(said, xid=error.number)
                # A switch has all GPUs behind it.
                bus = error.bus if error.kind == "Xid" else ""
                parts.append(mended_by(found, remedy_of(text), bus))
            elif status is Status.WARN:
                parts.append(warned(said, xid=error.number))
        return joined(parts, well="no Xid or SXid that points to a fault of the node")

    def _latest(self, seen: list[Message]) -> list[_Error]:
        """Return the latest of each device and number; of an SXid, one that tells its severity."""
        latest: dict[tuple[str, str, int], _Error] = {}
        named = "of unknown address"
        for message in seen:
            if lost := _LOST_GPU.search(message.text):
                error = _Error("Xid", lost["bus"] or named, _LOST, "", "", message.age_s)
            elif found := _XID.search(message.text):
                error = _error(found, "", message)
            elif found := _SXID.search(message.text):
                error = _error(found, found["word"] or "", message)
            else:
                if several := _LOST_GPU_NAMED.search(message.text):
                    named = several["bus"]
                continue
            key = error.kind, error.bus, error.number
            before = latest.get(key)
            # The lines that follow the driver's word hold figures.
            if before is None or error.kind == "Xid" or error.word or not before.word:
                latest[key] = error
        return list(latest.values())

    def _status(self, error: _Error) -> tuple[Status, str]:
        if error.number in self.ignore:
            return Status.PASS, ""
        if error.number in self.fault:
            return Status.NODE_FAULT, "configured as a fault"
        if error.number in self.warn:
            return Status.WARN, "configured as a warning"
        if error.kind == "Xid":
            status, text = judge_xid(error.number, error.text)
            drains = self.fatal_link_drains and error.number == _OF_A_LINK
            return (Status.NODE_FAULT if drains and fatal_link(error.text) else status), text
        fatal = {"Fatal": True, "Non-fatal": False}.get(error.word)
        status, text = judge_sxid(error.number, fatal=fatal)
        return status, f"{error.text}: {text}"


def _error(found: re.Match[str], word: str, message: Message) -> _Error:
    number = int(found["number"])
    return _Error(found["kind"], found["bus"], number, word, found["text"], message.age_s)
