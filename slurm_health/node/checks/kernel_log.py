# SPDX-License-Identifier: Apache-2.0
"""The kernel's log: lines of broken hardware; Xid and SXid errors of GPUs and NVSwitches.

Messages older than an hour, or than the boot, do not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, require_patterns
from slurm_health.node.rules.finding import (
    Finding,
    Status,
    joined,
    node_fault,
    passed,
    warned,
    with_remedy,
)
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    FAULTS,
    WARNINGS,
    KernelError,
    device_error,
    is_evidence,
    lost_gpu_named,
)
from slurm_health.records.errors import Unmeasured

KERNEL_LOG = "kernel log"
WINDOW_S = 3600.0
_MESSAGE_BYTES = 8192  # /dev/kmsg gives one record a read, and none is longer
_MOST_MESSAGES = 100_000
_LINE_CHARACTERS = 300
_OURS = frozenset((*FAULTS, *WARNINGS))
_BEGINS = r"(?:\(\?[aimsx]+\))?\^"
# What the driver wants done to recover: the latest of a GPU replaces the one before.
_WANTED_NOW = "Xid 154"

Numbers = tuple[Annotated[int, msgspec.Meta(ge=1, le=99_999)], ...]


def read_messages(
    machine: CheckContext, patterns: Sequence[re.Pattern[str]], window_s: float = WINDOW_S
) -> list[str]:
    """Return the kernel's messages that match a pattern, no older than `window_s`, the latest last.

    In a retest after a drain, messages count from `window_s` before the drain on, however long ago
    it was: a message that ages repairs nothing. Messages from before an administrator returned the
    node never count.

    A message that a program wrote into the log (`echo > /dev/kmsg`) is not the kernel's and is
    left out, as is one that begins with the name of a process: any user who may write there, or
    names a program, could otherwise drain the node.

    Raises:
        Unmeasured: the log cannot be read, which needs root, or no longer reaches back to what a
            drain may be for.
    """
    now_s = float(machine.read("/proc/uptime").split()[0])
    drained_s = now_s if machine.drained_uptime_s is None else min(machine.drained_uptime_s, now_s)
    since_s = max(drained_s - window_s, machine.returned_uptime_s)
    messages: list[str] = []
    first: tuple[int, float] | None = None
    for record in machine.once(KERNEL_LOG, lambda: _read_kmsg(machine)):
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
            continue
        written_s = int(fields[2]) / 1e6
        first = first or (int(fields[1]), written_s)
        from_kernel = int(fields[0]) >> 3 == 0
        line = text.partition("\n")[0][:_LINE_CHARACTERS]
        counts = from_kernel and written_s >= since_s and is_evidence(line)
        if counts and any(pattern.search(line) for pattern in patterns):
            messages.append(line)
    # The kernel numbers its messages from 0 and overwrites the oldest, which any user with a
    # process there can hasten. The message that a drain is for may be older than the drain.
    lost = first is None or (first[0] > 0 and first[1] > since_s)
    if machine.drained_uptime_s is not None and lost:
        raise Unmeasured("the kernel's log does not reach back to the drain any more")
    return messages


def _read_kmsg(machine: CheckContext) -> list[str]:
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
    r"""Messages of broken hardware or a broken filesystem, within an hour, in /dev/kmsg.

    Users choose names of programs, files and interfaces, and the kernel prints them. So begin a
    pattern with `^`, name a device as `[\w-]+`, and let nothing like `.*` stand before the
    kernel's own words. A line that begins with a process never counts. For a node that was drained
    for a message, older ones count until it is rebooted or released.
    """

    TOGETHER = True
    READS = KERNEL_LOG
    COMPONENTS = ("node", "compute", "storage")

    # Regular expressions of node faults. [Defaults](kernel-lines.md).
    fault: tuple[str, ...] = FAULTS
    # Regular expressions of warnings.
    warn: tuple[str, ...] = WARNINGS

    def __post_init__(self) -> None:
        require_patterns(*(text for text in (*self.fault, *self.warn) if text not in _OURS))
        for pattern in self.fault:
            # Users choose words in the middle of the kernel's lines: names of processes and mounts.
            if pattern not in _OURS and not re.match(_BEGINS, pattern):
                raise ValueError(
                    f"fault: {pattern!r} must begin with ^, or any user could have the kernel write"
                    " a line that matches it"
                )

    def measure(self, machine: CheckContext) -> Finding:
        """Read /dev/kmsg; quote the latest message of the worst kind."""
        parts = [passed("")]
        faults, warnings = _compiled(self.fault), _compiled(self.warn)
        wanted = [*faults, *warnings]
        messages = read_messages(machine, wanted) if wanted else []
        for patterns, judged in ((faults, node_fault), (warnings, warned)):
            matching = [
                line for line in messages if any(pattern.search(line) for pattern in patterns)
            ]
            if matching:
                count = f", {len(matching)} such messages" if len(matching) > 1 else ""
                text = f"{matching[-1]} (kernel log{count})"
                parts.append(judged(text, messages=len(matching)))
        return joined(parts, well="nothing relevant in the kernel log")


def _compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compile patterns: ours as one, which is ten times as fast, and a site's one by one.

    A site's may begin with flags, or number their groups, which no part of a longer one can.
    """
    ours = "|".join(f"(?:{pattern})" for pattern in patterns if pattern in _OURS)
    theirs = [pattern for pattern in patterns if pattern not in _OURS]
    return [re.compile(pattern) for pattern in ([ours] if ours else []) + theirs]


class Xid(Check, frozen=True, kw_only=True):
    """The worst Xids (GPUs) and SXids (NVSwitches) within an hour, by NVIDIA's tables.

    [Kernel lines](kernel-lines.md) lists them. Numbers that the tables lack are warnings. An SXid
    that the driver calls fatal is a fault. Of 154 the latest counts.
    """

    TOGETHER = True
    READS = KERNEL_LOG
    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    # Numbers that your site calls a node fault.
    fault: Numbers = ()
    # A warning.
    warn: Numbers = ()
    # Nothing.
    ignore: Numbers = ()

    def measure(self, machine: CheckContext) -> Finding:
        """Read /dev/kmsg."""
        return self.judge(read_messages(machine, [re.compile(ANY_XID)]))

    def judge(self, lines: Sequence[str]) -> Finding:
        """Judge lines of the log; a number counts once per GPU or NVSwitch. Pure."""
        amended = {
            **dict.fromkeys(self.warn, (Status.WARN, "a warning")),
            **dict.fromkeys(self.fault, (Status.NODE_FAULT, "a fault")),
            **dict.fromkeys(self.ignore, (Status.PASS, "ignored")),
        }
        worst: dict[tuple[str, str], KernelError] = {}
        named = ""
        for line in lines:
            named = lost_gpu_named(line) or named
            error = device_error(line)
            if error is None:
                continue
            bus = error.bus or named or "of unknown address"
            error = msgspec.structs.replace(error, bus=bus)
            if (number := int(error.name.split()[1])) in amended:
                status, word = amended[number]
                what = f"{error.what} (configured as {word})"
                error = msgspec.structs.replace(error, status=status, what=what)
            before = worst.get((error.name, bus))
            if before is None or error.name == _WANTED_NOW or _weight(error) >= _weight(before):
                worst[error.name, bus] = error
        parts = [passed("", xids=len(worst))]
        for error in worst.values():
            is_gpu = error.name.startswith("Xid")
            # `sinfo -R` shows 20 columns: the error comes first.
            text = f"{error.name} on {'GPU' if is_gpu else 'NVSwitch'} {error.bus}: {error.words}"
            if error.status is Status.NODE_FAULT:
                # A switch has all GPUs behind it.
                bus = error.bus if is_gpu else ""
                parts.append(with_remedy(node_fault(text), error.remedy, bus))
            elif error.status is Status.WARN:
                parts.append(warned(text))
        return joined(parts, well="no Xid or SXid that points to a fault of the node")


def _weight(error: KernelError) -> tuple[int, bool]:
    """Return how bad an error is, then whether its line states that.

    The lines that follow an NVSwitch's word hold figures.
    """
    return list(Status).index(error.status), error.states_severity
