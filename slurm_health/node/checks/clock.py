# SPDX-License-Identifier: Apache-2.0
"""Time and processors: the clock is disciplined, its source is a good one, all CPUs are online."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative
from slurm_health.node.checks.tasks import count_cpus
from slurm_health.node.rules.finding import Finding, Status, node_fault, passed
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

_STA_UNSYNC = 0x40
_STA_NANO = 0x2000
_TIME_ERROR = 5


class ClockState(NamedTuple):
    """What the kernel's clock discipline says of itself (adjtimex)."""

    synchronised: bool
    offset_ms: float


class Clock(Check, frozen=True, kw_only=True):
    """The clock follows a time server, and is not far off.

    A bad clock spoils logs and tickets, seldom a job.
    """

    TOGETHER = True
    SEVERITY = Status.WARN

    # The kernel must call it synchronised.
    synchronised: bool = True
    # From the time server.
    max_offset_ms: NotNegative = 100.0

    def measure(self, machine: CheckContext) -> Finding:  # noqa: ARG002 - no file holds this
        """Ask the kernel."""
        return self.judge(read_clock())

    def judge(self, clock: ClockState) -> Finding:
        """Judge the state of the clock. Pure."""
        if self.synchronised and not clock.synchronised:
            return node_fault("the clock is not synchronised")
        text = f"the clock is {clock.offset_ms:g} ms off"
        if abs(clock.offset_ms) > self.max_offset_ms:
            return node_fault(f"{text}, limit {self.max_offset_ms:g}", offset_ms=clock.offset_ms)
        return passed(text, offset_ms=clock.offset_ms)


def read_clock() -> ClockState:
    """Return the state of the kernel's clock.

    Raises:
        Unmeasured: it cannot be read.
    """
    import ctypes

    # struct timex of Linux on 64-bit machines: modes, offset, freq, maxerror, esterror, status.
    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("numbers", ctypes.c_long * 4),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_byte * 256),
        )

    timex = Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        raise Unmeasured("could not read the state of the kernel's clock (adjtimex)")
    per_ms = 1e6 if timex.status & _STA_NANO else 1e3
    return ClockState(
        synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        offset_ms=round(timex.numbers[0] / per_ms, 3),
    )


class ClockSource(Check, frozen=True, kw_only=True):
    """The clock source is one of the fast ones.

    The kernel leaves tsc when it goes wrong, and every call for the time is then slow.
    """

    TOGETHER = True
    COMPONENTS = ("node", "compute")

    # Any other is a node fault.
    allowed: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "tsc",
        "kvm-clock",
        "arch_sys_counter",
        "hyperv_clocksource_tsc_page",
        "timebase",
    )

    def measure(self, machine: CheckContext) -> Finding:
        """Read /sys/devices/system/clocksource."""
        source = read_clock_source(machine)
        if source not in self.allowed:
            return node_fault(f"clock source {source}, expected one of {', '.join(self.allowed)}")
        return passed(f"clock source {source}")


def read_clock_source(machine: CheckContext) -> str:
    """Return the name of the clock source in use."""
    base = "/sys/devices/system/clocksource/clocksource0"
    return machine.read(f"{base}/current_clocksource").strip()


class Cpus(Check, frozen=True, kw_only=True):
    """Every CPU is online."""

    TOGETHER = True
    COMPONENTS = ("node", "compute")

    # Fewer is a node fault.
    min_online: Annotated[int, msgspec.Meta(ge=1)]

    def measure(self, machine: CheckContext) -> Finding:
        """Count the CPUs in /sys/devices/system/cpu/online."""
        online = count_cpus(machine.read("/sys/devices/system/cpu/online"))
        text = f"{counted(online, 'CPU')} online"
        if online < self.min_online:
            return node_fault(f"{text}, limit {self.min_online}", online=online)
        return passed(text, online=online)
