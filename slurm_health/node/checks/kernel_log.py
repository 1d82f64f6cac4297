# SPDX-License-Identifier: Apache-2.0
"""Patterns in the kernel's log. Messages older than a while, or than the boot, do not count.

Xid and SXid errors are what NVIDIA's drivers wrote there of GPUs and NVSwitches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, require_patterns
from slurm_health.node.rules.finding import (
    Finding,
    Status,
    joined,
    mended_by,
    node_fault,
    passed,
    warned,
)
from slurm_health.node.rules.kernel_lines import (
    ANY_XID,
    FAULTS,
    LOST_GPU,
    LOST_GPU_NAMED,
    SXID,
    WARNINGS,
    XID,
    address,
    is_evidence,
)
from slurm_health.node.rules.xid import fatal_link, judge_sxid, judge_xid, remedy_of
from slurm_health.records.errors import Unmeasured

KERNEL_LOG = "kernel log"
_MESSAGE_BYTES = 8192  # /dev/kmsg gives one record a read, and none is longer
_MOST_MESSAGES = 100_000
_KEPT_MESSAGES = 200  # of each kind: what a child answers is limited, and a log may be flooded
_LINE_CHARACTERS = 300
_OURS = frozenset((*FAULTS, *WARNINGS))
_BEGINS = re.compile(r"(?:\(\?[aimsx]+\))?\^")
_ANY_XID, _XID, _SXID = re.compile(ANY_XID), re.compile(XID), re.compile(SXID)
_LOST_GPU, _LOST_GPU_NAMED = re.compile(LOST_GPU), re.compile(LOST_GPU_NAMED)
_LOST = 79  # the Xid of a GPU that has fallen off the bus
_OF_A_LINK = 74
_WANTED_NOW = 154  # what the driver wants done to recover: each takes the place of the one before

Numbers = tuple[Annotated[int, msgspec.Meta(ge=1, le=99_999)], ...]


class KernelMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the kernel and how long ago it was."""

    age_s: float
    text: str


def read_messages(
    machine: CheckContext, patterns: Sequence[re.Pattern[str]], window_s: float
) -> list[KernelMessage]:
    """Return the kernel's messages that match one, no older than `window_s`, the latest last.

    Where a drain is tested again, they count from `window_s` before that drain on, however long ago
    it was: that a message grows old repairs nothing. Those from before a person returned the node
    never count.

    A message that a program wrote into the log (`echo > /dev/kmsg`) is not the kernel's and is
    left out, as is one that begins with the name of a process: whoever may write there, or names a
    program, could otherwise drain the node.

    Raises:
        Unmeasured: the log cannot be read, which needs root, or no longer reaches back to what a
            drain may be for.
    """
    now_s = uptime_s(machine)
    drained_s = now_s if machine.drained_uptime_s is None else min(machine.drained_uptime_s, now_s)
    since_s = max(drained_s - window_s, machine.returned_uptime_s)
    found: list[KernelMessage] = []
    first: tuple[int, float] | None = None
    for record in machine.once(KERNEL_LOG, lambda: _records(machine)):
        head, _, text = record.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not all(each.isdigit() for each in fields[:3]):
            continue
        written_s = int(fields[2]) / 1e6
        first = first or (int(fields[1]), written_s)
        from_kernel = int(fields[0]) >> 3 == 0
        line = text.partition("\n")[0][:_LINE_CHARACTERS]
        in_question = from_kernel and written_s >= since_s and is_evidence(line)
        if in_question and any(each.search(line) for each in patterns):
            found.append(KernelMessage(age_s=round(now_s - written_s, 1), text=line))
    # The kernel numbers its messages from 0; the oldest are overwritten, and whoever has processes
    # there can hasten that. What a drain is for may have been said some time before it.
    lost = first is None or (first[0] > 0 and first[1] > since_s)
    if machine.drained_uptime_s is not None and lost:
        raise Unmeasured("the kernel's log does not reach back to the drain any more")
    return found


def uptime_s(machine: CheckContext) -> float:
    """Return the seconds since the machine was started.

    Raises:
        Unmeasured: it cannot be read.
    """
    return float(machine.read("/proc/uptime").split()[0])


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

    SEEN = list[KernelMessage]
    TOGETHER = True
    LOOKS_AT = KERNEL_LOG
    COMPONENTS = ("node", "compute", "storage")

    fault: tuple[str, ...] = FAULTS
    warn: tuple[str, ...] = WARNINGS
    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0

    def __post_init__(self) -> None:
        require_patterns(*self.fault, *self.warn)
        for pattern in self.fault:
            # Users choose words in the middle of the kernel's lines: names of processes and mounts.
            if not _BEGINS.match(pattern):
                raise ValueError(
                    f"fault: {pattern!r} must begin with ^, or any user could have the kernel write"
                    " a line that matches it"
                )

    def collect(self, machine: CheckContext) -> list[KernelMessage]:
        """Read /dev/kmsg."""
        patterns = _compiled((*self.fault, *self.warn))
        seen = read_messages(machine, patterns, self.window_s) if patterns else []
        kept = {place for kind in (self.fault, self.warn) for place in _latest(seen, kind)}
        return [seen[place] for place in sorted(kept)]

    def judge(self, seen: list[KernelMessage]) -> Finding:
        """Name the latest message of the worst kind."""
        parts = []
        for patterns, judged in ((self.fault, node_fault), (self.warn, warned)):
            wanted = _compiled(patterns)
            found = [each for each in seen if any(one.search(each.text) for one in wanted)]
            if found:
                more = f" ({len(found)} such messages)" if len(found) > 1 else ""
                text = f"kernel: {found[-1].text}{more}"
                age_s = found[-1].age_s
                parts.append(judged(text, messages=len(found), age_s=age_s))
        return joined(parts or [passed("")], well="nothing relevant in the kernel log")


def _compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compile patterns: ours as one, which is ten times as fast, and each of a site's for itself.

    Those may begin with flags, or count their groups, as no part of a longer one can.
    """
    ours = "|".join(f"(?:{each})" for each in patterns if each in _OURS)
    theirs = [each for each in patterns if each not in _OURS]
    return [re.compile(each) for each in ([ours] if ours else []) + theirs]


def _latest(seen: Sequence[KernelMessage], patterns: Sequence[str]) -> list[int]:
    """Return where the latest messages stand that match one of the patterns."""
    wanted = _compiled(patterns)
    places = (
        n for n in reversed(range(len(seen))) if any(each.search(seen[n].text) for each in wanted)
    )
    return list(islice(places, _KEPT_MESSAGES))


class _Error(NamedTuple):
    """An error of a device; `word` is how severe an NVSwitch's is, empty where it is not told.

    `places` are those of the messages that tell of it.
    """

    kind: str
    bus: str
    number: int
    word: str
    text: str
    age_s: float
    places: tuple[int, ...]


class Xid(Check, frozen=True, kw_only=True):
    """The worst Xids and SXids, judged by NVIDIA's tables as the site has amended them."""

    SEEN = list[KernelMessage]
    TOGETHER = True
    LOOKS_AT = KERNEL_LOG
    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    window_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    fault: Numbers = ()
    warn: Numbers = ()
    ignore: Numbers = ()
    fatal_link_drains: bool = False

    def collect(self, machine: CheckContext) -> list[KernelMessage]:
        """Read /dev/kmsg, and keep the messages that decide, the worst where they are many."""
        seen = read_messages(machine, [_ANY_XID], self.window_s)
        worst = sorted(self._deciding(seen), key=self._weight, reverse=True)[:_KEPT_MESSAGES]
        return [seen[n] for n in sorted({n for error in worst for n in error.places})]

    def judge(self, seen: list[KernelMessage]) -> Finding:
        """Judge each GPU's and NVSwitch's errors; a number counts once for each of them."""
        deciding = self._deciding(seen)
        parts = [passed("", xids=len(deciding))]
        for error in deciding:
            status, text = self._status(error)
            device = "GPU" if error.kind == "Xid" else "NVSwitch"
            said = f"{device} {error.bus}: {error.kind} {error.number} ({text})"
            if status is Status.NODE_FAULT:
                found = node_fault(said, xid=error.number)
                # A switch has all GPUs behind it.
                bus = error.bus if error.kind == "Xid" else ""
                parts.append(mended_by(found, remedy_of(text), bus))
            elif status is Status.WARN:
                parts.append(warned(said, xid=error.number))
        return joined(parts, well="no Xid or SXid that points to a fault of the node")

    def _deciding(self, seen: list[KernelMessage]) -> list[_Error]:
        """Return the worst of each device and number, of several the latest."""
        deciding: dict[tuple[str, str, int], _Error] = {}
        named = "of unknown address"
        naming: tuple[int, ...] = ()
        for place, message in enumerate(seen):
            if lost := _LOST_GPU.match(message.text):
                places = (place,) if lost["bus"] else (*naming, place)
                bus = address(lost["bus"]) if lost["bus"] else named
                error = _Error("Xid", bus, _LOST, "", "", message.age_s, places)
            elif found := _XID.match(message.text):
                error = _error(found, "", message, place)
            elif found := _SXID.match(message.text):
                error = _error(found, found["word"] or "", message, place)
            else:
                if several := _LOST_GPU_NAMED.match(message.text):
                    named, naming = address(several["bus"]), (place,)
                continue
            key = error.kind, error.bus, error.number
            before = deciding.get(key)
            is_state = error.kind == "Xid" and error.number == _WANTED_NOW
            if before is None or is_state or self._weight(error) >= self._weight(before):
                deciding[key] = error
        return list(deciding.values())

    def _weight(self, error: _Error) -> tuple[int, bool]:
        """Return how much an error says: how bad it is, then whether it tells its severity.

        The lines that follow an NVSwitch's word hold figures.
        """
        status, _ = self._status(error)
        return list(Status).index(status), bool(error.word or fatal_link(error.text))

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


def _error(found: re.Match[str], word: str, message: KernelMessage, place: int) -> _Error:
    kind, bus, number, text = found.group("kind", "bus", "number", "text")
    return _Error(kind, address(bus), int(number), word, text, message.age_s, (place,))
