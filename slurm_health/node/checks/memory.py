# SPDX-License-Identifier: Apache-2.0
"""Memory: how much there is, swap, errors the memory controller counted, forgotten huge pages."""

from __future__ import annotations

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotNegative,
    Percent,
    Seen,
    Unmeasured,
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
from slurm_health.records.text import counted

_KIB_PER_GIB = 1 << 20
_COMPUTE = ("node", "compute", "memory")


class Meminfo(dict[str, int]):
    """The fields of /proc/meminfo, in KiB or plain numbers as the kernel gives them."""

    def __missing__(self, name: str) -> int:
        raise Unmeasured(f"/proc/meminfo has no {name}")


def read_meminfo(machine: CheckContext) -> Meminfo:
    """Return the fields of /proc/meminfo. One that this kernel does not tell is Unmeasured."""
    fields = Meminfo()
    for line in machine.read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0])
    return fields


class MemorySeen(Seen, frozen=True, kw_only=True):
    """RAM as the kernel counts it."""

    total_kib: int
    available_kib: int


class Memory(Check, frozen=True, kw_only=True):
    """RAM present, and RAM free before a job begins."""

    SEEN = MemorySeen
    TOGETHER = True
    COMPONENTS = _COMPUTE

    min_total_gib: NotNegative = 0.0
    min_available_gib: NotNegative = 0.0

    def collect(self, machine: CheckContext) -> MemorySeen:
        """Read /proc/meminfo."""
        fields = read_meminfo(machine)
        return MemorySeen(total_kib=fields["MemTotal"], available_kib=fields["MemAvailable"])

    def judge(self, seen: MemorySeen) -> Finding:
        """A missing module is the node's fault; too little free is somebody's, not proven whose."""
        total_gib = round(seen.total_kib / _KIB_PER_GIB, 2)
        available_gib = round(seen.available_kib / _KIB_PER_GIB, 2)
        if total_gib < self.min_total_gib:
            return node_fault(
                f"{total_gib:g} GiB of memory, limit {self.min_total_gib:g}",
                total_gib=total_gib,
                min_total_gib=self.min_total_gib,
            )
        if available_gib < self.min_available_gib:
            return user_fault(
                f"{available_gib:g} GiB of memory available, limit {self.min_available_gib:g}",
                available_gib=available_gib,
                min_available_gib=self.min_available_gib,
            )
        return passed(f"{total_gib:g} GiB of memory", total_gib=total_gib)


class SwapSeen(Seen, frozen=True, kw_only=True):
    """Swap as the kernel counts it."""

    total_kib: int
    free_kib: int


class Swap(Check, frozen=True, kw_only=True):
    """Swap space: there is as much as there should be, and little of it is used."""

    SEEN = SwapSeen
    TOGETHER = True
    SEVERITY = Status.WARN

    min_total_gib: NotNegative = 0.0
    max_total_gib: NotNegative | None = None
    max_used_percent: Percent = 50.0

    def collect(self, machine: CheckContext) -> SwapSeen:
        """Read /proc/meminfo."""
        fields = read_meminfo(machine)
        return SwapSeen(total_kib=fields["SwapTotal"], free_kib=fields["SwapFree"])

    def judge(self, seen: SwapSeen) -> Finding:
        """The size is the node's; what fills it is a job's."""
        total_gib = round(seen.total_kib / _KIB_PER_GIB, 2)
        if total_gib < self.min_total_gib:
            return node_fault(f"{total_gib:g} GiB of swap, limit {self.min_total_gib:g}")
        if self.max_total_gib is not None and total_gib > self.max_total_gib:
            return node_fault(f"{total_gib:g} GiB of swap, at most {self.max_total_gib:g} allowed")
        used = 100 * (1 - seen.free_kib / seen.total_kib) if seen.total_kib else 0.0
        if used > self.max_used_percent:
            return user_fault(
                f"{used:.0f} % of swap in use, limit {self.max_used_percent:g}",
                used_percent=round(used, 1),
            )
        return passed(f"{total_gib:g} GiB of swap, {used:.0f} % in use", total_gib=total_gib)


class Edac(Check, frozen=True, kw_only=True):
    """Memory errors that the EDAC driver counted since it was loaded."""

    # Corrected and uncorrected errors per memory controller.
    SEEN = dict[str, tuple[int, int]]
    TOGETHER = True
    COMPONENTS = _COMPUTE

    max_uncorrected: Count = 0
    max_corrected: Count = 1000

    def collect(self, machine: CheckContext) -> dict[str, tuple[int, int]]:
        """Read /sys/devices/system/edac/mc."""
        base = "/sys/devices/system/edac/mc"
        controllers = {}
        for name in machine.entries(base):
            if name.startswith("mc") and name[2:].isdigit():
                counts = [machine.read(f"{base}/{name}/{kind}_count") for kind in ("ce", "ue")]
                controllers[name] = (int(counts[0]), int(counts[1]))
        if not controllers:
            raise Unmeasured(f"{base} has no memory controller: the EDAC driver is not loaded")
        return controllers

    def judge(self, seen: dict[str, tuple[int, int]]) -> Finding:
        """An uncorrected error is a fault; many corrected ones are worth a look."""
        parts = [self._controller(name, *counts) for name, counts in seen.items()]
        return joined(
            parts, well=f"{counted(len(parts), 'memory controller')} without significant errors"
        )

    def _controller(self, name: str, corrected: int, uncorrected: int) -> Finding:
        if uncorrected > self.max_uncorrected:
            errors = counted(uncorrected, "uncorrected memory error")
            return node_fault(
                f"{name}: {errors}, limit {self.max_uncorrected}", uncorrected=uncorrected
            )
        if corrected > self.max_corrected:
            return warned(
                f"{name}: {counted(corrected, 'corrected memory error')}", corrected=corrected
            )
        return passed(name)


class HugePages(Check, frozen=True, kw_only=True):
    """Huge pages that an earlier job reserved and nobody gave back."""

    # Reserved pages per size in KiB.
    SEEN = dict[str, int]
    TOGETHER = True
    SEVERITY = Status.USER_FAULT
    CONTEXTS = ("prolog", "epilog")

    max_reserved_gib: NotNegative = 0.0

    def collect(self, machine: CheckContext) -> dict[str, int]:
        """Read /sys/kernel/mm/hugepages."""
        base = "/sys/kernel/mm/hugepages"
        pages = {}
        for name in machine.entries(base):
            size = name.removeprefix("hugepages-").removesuffix("kB")
            if size.isdigit():
                pages[size] = int(machine.read(f"{base}/{name}/nr_hugepages"))
        if not pages:
            raise Unmeasured(f"{base} lists no page sizes")
        return pages

    def judge(self, seen: dict[str, int]) -> Finding:
        """More than the site's own reserve was left by a job."""
        reserved_kib = sum(int(size) * count for size, count in seen.items())
        reserved_gib = round(reserved_kib / _KIB_PER_GIB, 3)
        if reserved_gib > self.max_reserved_gib:
            return user_fault(
                f"{reserved_gib:g} GiB in huge pages, limit {self.max_reserved_gib:g}",
                reserved_gib=reserved_gib,
            )
        return passed(f"{reserved_gib:g} GiB in huge pages", reserved_gib=reserved_gib)
