# SPDX-License-Identifier: Apache-2.0
"""Time and processors: the clock has a good source, all CPUs are online."""

from __future__ import annotations

from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext
from slurm_health.node.checks.tasks import count_cpus
from slurm_health.node.rules.finding import Finding, node_fault, passed
from slurm_health.records.text import counted


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
