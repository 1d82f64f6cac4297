# SPDX-License-Identifier: Apache-2.0
"""Memory: how much there is, swap, errors that the memory controller counted."""

from __future__ import annotations

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotNegative,
    Percent,
)
from slurm_health.node.rules.finding import (
    Finding,
    Status,
    joined,
    node_fault,
    passed,
    user_fault,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

_KIB_PER_GIB = 1 << 20
_COMPUTE = ("node", "compute", "memory")


class Meminfo(dict[str, int]):
    """The fields of /proc/meminfo, in KiB or plain numbers as the kernel gives them."""

    def __missing__(self, name: str) -> int:
        raise Unmeasured(f"/proc/meminfo has no {name}")


def read_meminfo(machine: CheckContext) -> Meminfo:
    """Return the fields of /proc/meminfo. One that this kernel does not have is Unmeasured."""
    fields = Meminfo()
    for line in machine.read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0])
    return fields


class Memory(Check, frozen=True, kw_only=True):
    """RAM present, and RAM free before a job begins, by /proc/meminfo."""

    TOGETHER = True
    COMPONENTS = _COMPUTE

    # Less is a node fault: a module is missing or was mapped out.
    min_total_gib: NotNegative = 0.0
    # Less is a user fault, since what uses the rest is unknown.
    min_available_gib: NotNegative = 0.0

    def measure(self, machine: CheckContext) -> Finding:
        """Judge /proc/meminfo: too little in total is the node's fault, too little free is not."""
        fields = read_meminfo(machine)
        total_gib = round(fields["MemTotal"] / _KIB_PER_GIB, 2)
        available_gib = round(fields["MemAvailable"] / _KIB_PER_GIB, 2)
        if total_gib < self.min_total_gib:
            text = f"{total_gib:g} GiB of memory, limit {self.min_total_gib:g}"
            return node_fault(text, total_gib=total_gib, min_total_gib=self.min_total_gib)
        if available_gib < self.min_available_gib:
            text = f"{available_gib:g} GiB of memory available, limit {self.min_available_gib:g}"
            return user_fault(text, available_gib=available_gib)
        return passed(f"{total_gib:g} GiB of memory", total_gib=total_gib)


class Swap(Check, frozen=True, kw_only=True):
    """Swap space: there is as much as there should be, and little of it is used."""

    TOGETHER = True
    SEVERITY = Status.WARN

    # Less is a fault.
    min_total_gib: NotNegative = 0.0
    # More is a user fault.
    max_used_percent: Percent = 50.0

    def measure(self, machine: CheckContext) -> Finding:
        """Judge /proc/meminfo. The size is the node's; what fills it is a job's."""
        fields = read_meminfo(machine)
        total_kib, free_kib = fields["SwapTotal"], fields["SwapFree"]
        total_gib = round(total_kib / _KIB_PER_GIB, 2)
        if total_gib < self.min_total_gib:
            return node_fault(f"{total_gib:g} GiB of swap, limit {self.min_total_gib:g}")
        used = 100 * (1 - free_kib / total_kib) if total_kib else 0.0
        if used > self.max_used_percent:
            text = f"{used:.0f} % of swap in use, limit {self.max_used_percent:g}"
            return user_fault(text, used_percent=round(used, 1))
        return passed(f"{total_gib:g} GiB of swap, {used:.0f} % in use", total_gib=total_gib)


class Edac(Check, frozen=True, kw_only=True):
    """Memory errors since the EDAC driver was loaded. Inconclusive without the driver."""

    TOGETHER = True
    COMPONENTS = _COMPUTE

    # More is a node fault.
    max_uncorrected: Count = 0
    # More is a warning.
    max_corrected: Count = 1000

    def measure(self, machine: CheckContext) -> Finding:
        """Read /sys/devices/system/edac/mc: uncorrected errors are faults, many others warn."""
        base = "/sys/devices/system/edac/mc"
        parts = []
        for name in machine.entries(base):
            if not (name.startswith("mc") and name[2:].isdigit()):
                continue
            corrected = int(machine.read(f"{base}/{name}/ce_count"))
            uncorrected = int(machine.read(f"{base}/{name}/ue_count"))
            if uncorrected > self.max_uncorrected:
                errors = counted(uncorrected, "uncorrected memory error")
                text = f"{errors} on {name}, limit {self.max_uncorrected}"
                parts.append(node_fault(text, uncorrected=uncorrected))
            elif corrected > self.max_corrected:
                text = f"{counted(corrected, 'corrected memory error')} on {name}"
                parts.append(warned(text, corrected=corrected))
            else:
                parts.append(passed(name))
        if not parts:
            raise Unmeasured(f"{base} has no memory controller: the EDAC driver is not loaded")
        controllers = counted(len(parts), "memory controller")
        return joined(parts, well=f"{controllers} without significant errors")
