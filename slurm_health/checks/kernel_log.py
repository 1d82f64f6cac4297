# SPDX-License-Identifier: Apache-2.0
"""Patterns in the kernel's log. Messages older than a while, or than the boot, do not count."""

from __future__ import annotations

import os
import re
from typing import Annotated

import msgspec

from slurm_health.checks.check import Check, CheckContext, require_patterns
from slurm_health.core.node.finding import Finding, Unmeasured, joined, node_fault, passed, warned

KERNEL_LOG = "kernel log"
_MESSAGE_BYTES = 8192  # /dev/kmsg gives one record a read, and none is longer
_MOST_MESSAGES = 100_000
_KEPT_MESSAGES = 200


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the kernel and how long ago it was."""

    age_s: float
    text: str


def read_messages(machine: CheckContext, pattern: str, window_s: float) -> list[Message]:
    """Return the latest messages of the kernel that match, no older than `window_s`.

    A message that a program wrote into the log (`echo > /dev/kmsg`) is not the kernel's and is
    left out: who may write there could otherwise drain the node.

    Raises:
        Unmeasured: the log cannot be read, which needs root.
    """
    now_s = float(machine.read("/proc/uptime").split()[0])
    wanted = re.compile(pattern)
    found: list[Message] = []
    for record in machine.once(KERNEL_LOG, lambda: _records(machine)):
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[0].isdigit() or not fields[2].isdigit():
            continue
        from_kernel = int(fields[0]) >> 3 == 0
        age_s = now_s - int(fields[2]) / 1e6
        if from_kernel and age_s <= window_s and wanted.search(text):
            found.append(Message(age_s=round(age_s, 1), text=text.partition("\n")[0][:300]))
    return found[-_KEPT_MESSAGES:]


def _records(machine: CheckContext) -> list[str]:
    path = machine.path("/dev/kmsg")
    records: list[str] = []
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as err:
        raise Unmeasured(f"/dev/kmsg: {err.strerror}") from err
    try:
        recorded = path.is_file()
        while len(records) < _MOST_MESSAGES:
            try:
                data = os.read(file, 1 << 24 if recorded else _MESSAGE_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while we read; the next read goes on
                continue
            if not data:
                break
            text = data.decode(errors="replace")
            records += text.split("\n") if recorded else [text]
    finally:
        os.close(file)
    return records


class KernelLog(Check, frozen=True, kw_only=True):
    """Messages that tell of broken hardware or a broken filesystem."""

    SEEN = list[Message]
    TOGETHER = True
    LOOKS_AT = KERNEL_LOG
    COMPONENTS = ("node", "compute", "storage")

    # From the beginning of a message: the kernel writes names of programs into others, and a user
    # chooses those. A loop device's filesystem may be an image that a user brought along.
    fault: tuple[str, ...] = (
        r"^mce: \[Hardware Error\]: .*(Uncorrected|uncorrected|Fatal)",
        r"^Memory failure: 0x[0-9a-f]+: recovery action for .*: (Failed|Ignored)",
        r"^EXT4-fs error \(device (?!loop)",
        r"^EXT4-fs \((?!loop)[^)]+\): Remounting filesystem read-only",
        r"^XFS \((?!loop)[^)]+\): .*(metadata I/O error|Corruption)",
        r"^BTRFS (error|critical) \(device (?!loop)",
        r"^nvme nvme\d+: (controller is down|Removing after probe failure)",
    )
    warn: tuple[str, ...] = (
        r"soft lockup|hard LOCKUP|rcu.*self-detected stall",
        r"blocked for more than \d+ seconds",
        r"^(Out of memory|Memory cgroup out of memory)",
        r"PCIe Bus Error: severity=(Uncorrected|Fatal)",
    )
    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0

    def __post_init__(self) -> None:
        require_patterns(*self.fault, *self.warn)

    def collect(self, machine: CheckContext) -> list[Message]:
        """Read /dev/kmsg."""
        patterns = "|".join(f"(?:{each})" for each in (*self.fault, *self.warn))
        return read_messages(machine, patterns, self.window_s) if patterns else []

    def judge(self, seen: list[Message]) -> Finding:
        """Name the latest message of the worst kind."""
        parts = []
        for patterns, judged in ((self.fault, node_fault), (self.warn, warned)):
            found = [each for each in seen if any(re.search(p, each.text) for p in patterns)]
            if found:
                text = f"kernel: {found[-1].text} ({found[-1].age_s:.0f} s ago"
                more = f", {len(found)} such messages)" if len(found) > 1 else ")"
                parts.append(judged(text + more, messages=len(found)))
        return joined(parts or [passed("")], well="nothing relevant in the kernel log")
