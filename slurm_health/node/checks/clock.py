# SPDX-License-Identifier: Apache-2.0
"""Time and processors: the clock is disciplined, its source is a good one, all CPUs are online."""

from __future__ import annotations

from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative, Seen
from slurm_health.node.checks.tasks import count_cpus
from slurm_health.node.rules.finding import Finding, Status, node_fault, passed, warned
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

_STA_UNSYNC = 0x40
_STA_NANO = 0x2000
_TIME_ERROR = 5


class ClockSeen(Seen, frozen=True, kw_only=True):
    """What the kernel's clock discipline says of itself (adjtimex)."""

    synchronised: bool
    offset_ms: float
    max_error_ms: float


class Clock(Check, frozen=True, kw_only=True):
    """The clock follows a time server, and is not far off."""

    SEEN = ClockSeen
    TOGETHER = True
    SEVERITY = Status.WARN

    synchronised: bool = True
    max_offset_ms: NotNegative = 100.0
    max_error_ms: NotNegative | None = None

    def collect(self, _machine: CheckContext) -> ClockSeen:
        """Ask the kernel; no file holds this."""
        return _adjtimex()

    def judge(self, seen: ClockSeen) -> Finding:
        """Warn by default: a bad clock spoils logs and tickets, seldom a job."""
        if self.synchronised and not seen.synchronised:
            return node_fault("the clock is not synchronised")
        if abs(seen.offset_ms) > self.max_offset_ms:
            text = f"the clock is {seen.offset_ms:g} ms off, limit {self.max_offset_ms:g}"
            return node_fault(text, offset_ms=seen.offset_ms)
        if self.max_error_ms is not None and seen.max_error_ms > self.max_error_ms:
            text = f"the clock may be {seen.max_error_ms:g} ms off, limit {self.max_error_ms:g}"
            return warned(text, max_error_ms=seen.max_error_ms)
        return passed(f"the clock is {seen.offset_ms:g} ms off", offset_ms=seen.offset_ms)


def _adjtimex() -> ClockSeen:
    import ctypes

    # struct timex of Linux on 64-bit machines: modes, offset, freq, maxerror, esterror, status.
    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_byte * 256),
        )

    timex = Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        raise Unmeasured("could not read the state of the kernel's clock (adjtimex)")
    per_ms = 1e6 if timex.status & _STA_NANO else 1e3
    return ClockSeen(
        synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        offset_ms=round(timex.offset / per_ms, 3),
        max_error_ms=round(timex.maxerror / 1e3, 3),
    )


class ClockSource(Check, frozen=True, kw_only=True):
    """The clock source is one of the fast ones; the kernel leaves tsc when it goes wrong."""

    SEEN = str
    TOGETHER = True
    COMPONENTS = ("node", "compute")

    allowed: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "tsc",
        "kvm-clock",
        "arch_sys_counter",
        "hyperv_clocksource_tsc_page",
        "timebase",
    )

    def collect(self, machine: CheckContext) -> str:
        """Read /sys/devices/system/clocksource."""
        base = "/sys/devices/system/clocksource/clocksource0"
        return machine.read(f"{base}/current_clocksource").strip()

    def judge(self, seen: str) -> Finding:
        """A slow source makes every call for the time slow."""
        if seen not in self.allowed:
            allowed = ", ".join(self.allowed)
            return node_fault(f"clock source {seen}, expected one of {allowed}")
        return passed(f"clock source {seen}")


class Cpus(Check, frozen=True, kw_only=True):
    """Every CPU is online."""

    SEEN = int
    TOGETHER = True
    COMPONENTS = ("node", "compute")

    min_online: Annotated[int, msgspec.Meta(ge=1)]

    def collect(self, machine: CheckContext) -> int:
        """Read /sys/devices/system/cpu/online."""
        return count_cpus(machine.read("/sys/devices/system/cpu/online"))

    def judge(self, seen: int) -> Finding:
        """Fewer than there should be is the node's fault."""
        if seen < self.min_online:
            return node_fault(
                f"{counted(seen, 'CPU')} online, limit {self.min_online}", online=seen
            )
        return passed(f"{counted(seen, 'CPU')} online", online=seen)
