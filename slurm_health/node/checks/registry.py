# SPDX-License-Identifier: Apache-2.0
"""Which checks there are. A check's module is loaded when a site uses it, and not before."""

from __future__ import annotations

import importlib

from slurm_health.node.checks.check import Check

ENTRY_POINTS = "slurm_health.checks"

BUILT_IN: dict[str, str] = {
    "memory": "slurm_health.node.checks.memory:Memory",
    "swap": "slurm_health.node.checks.memory:Swap",
    "edac": "slurm_health.node.checks.memory:Edac",
    "hugepages": "slurm_health.node.checks.memory:HugePages",
    "filesystem": "slurm_health.node.checks.filesystem:Filesystem",
    "load": "slurm_health.node.checks.tasks:Load",
    "zombies": "slurm_health.node.checks.tasks:Zombies",
    "uninterruptible": "slurm_health.node.checks.tasks:Uninterruptible",
    "leftovers": "slurm_health.node.checks.tasks:Leftovers",
    "daemon": "slurm_health.node.checks.tasks:Daemon",
    "unit": "slurm_health.node.checks.tasks:Unit",
    "clock": "slurm_health.node.checks.clock:Clock",
    "clocksource": "slurm_health.node.checks.clock:ClockSource",
    "cpus": "slurm_health.node.checks.clock:Cpus",
    "cpu-speed": "slurm_health.node.checks.cpu_speed:CpuSpeed",
    "kernel-log": "slurm_health.node.checks.kernel_log:KernelLog",
    "xid": "slurm_health.node.checks.kernel_log:Xid",
    "ethernet": "slurm_health.node.checks.network:Ethernet",
    "infiniband": "slurm_health.node.checks.network:InfiniBand",
    "gpu": "slurm_health.node.checks.gpu:Gpu",
    "gpu-processes": "slurm_health.node.checks.gpu:GpuProcesses",
    "amd-gpu": "slurm_health.node.checks.amd_gpu:AmdGpus",
    "nvme": "slurm_health.node.checks.nvme:Nvme",
    "bmc": "slurm_health.node.checks.bmc:Bmc",
    "optics": "slurm_health.node.checks.optics:Optics",
    "dcgm": "slurm_health.node.checks.dcgm:Dcgm",
    "file": "slurm_health.node.checks.external:File",
    "command": "slurm_health.node.checks.external:Command",
    "nagios": "slurm_health.node.checks.external:Nagios",
    "nhc": "slurm_health.node.checks.external:Nhc",
}


class UnknownCheck(LookupError):
    """There is no check of that name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"no check is called {name}")


def find(name: str) -> type[Check]:
    """Return the check of that name.

    Raises:
        UnknownCheck: none is built in, and no installed distribution brings one.
        ImportError, AttributeError, TypeError: a distribution registered one that cannot be loaded.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: object = getattr(importlib.import_module(module), attribute)
    else:
        found = _from_other_distributions(name)
    if not (isinstance(found, type) and issubclass(found, Check)):
        raise TypeError(f"{name} is registered as a check and is none")
    return found


def names() -> tuple[str, ...]:
    """Return the names of all checks, those of other distributions too."""
    return (*BUILT_IN, *(point for point in _entry_points() if point not in BUILT_IN))


def _from_other_distributions(name: str) -> object:
    points = _entry_points()
    if name not in points:
        raise UnknownCheck(name, (*BUILT_IN, *points))
    module, _, attribute = points[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _entry_points() -> dict[str, str]:
    # Slow to load, and needed only where a site uses a check that is not ours.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
