# SPDX-License-Identifier: Apache-2.0
"""Memory: how much there is, swap, errors the memory controller counted, forgotten huge pages."""

from __future__ import annotations

from typing import ClassVar

from slurm_health.checks.check import (
    Check,
    CheckContext,
    Count,
    NotNegative,
    Percent,
    Seen,
    Unmeasured,
)
from slurm_health.core.node.finding import (
    Finding,
    Status,
    joined,
    node_fault,
    passed,
    user_fault,
    warned,
)

_KIB_PER_GIB = 1 << 20
_COMPUTE = ("node", "compute", "memory")


def read_meminfo(context: CheckContext) -> dict[str, int]:
    """Return the fields of /proc/meminfo, in KiB or plain numbers as the kernel gives them."""
    fields = {}
    for line in context.read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0])
    return fields


def field(fields: dict[str, int], name: str) -> int:
    """Return one field.

    Raises:
        Unmeasured: this kernel does not tell it.
    """
    if name not in fields:
        raise Unmeasured(f"/proc/meminfo has no {name}")
    return fields[name]


class MemorySeen(Seen, frozen=True, kw_only=True):
    """RAM as the kernel counts it."""

    total_kib: int
    available_kib: int


class Memory(Check, frozen=True, kw_only=True):
    """RAM present, and RAM free before a job begins."""

    SEEN: ClassVar[type[Seen]] = MemorySeen
    TOGETHER: ClassVar[bool] = True
    COMPONENTS: ClassVar[tuple[str, ...]] = _COMPUTE

    min_total_gib: NotNegative = 0.0
    min_available_gib: NotNegative = 0.0

    def collect(self, context: CheckContext) -> MemorySeen:
        """Read /proc/meminfo."""
        fields = read_meminfo(context)
        return MemorySeen(
            total_kib=field(fields, "MemTotal"), available_kib=field(fields, "MemAvailable")
        )

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

    SEEN: ClassVar[type[Seen]] = SwapSeen
    TOGETHER: ClassVar[bool] = True
    SEVERITY: ClassVar[Status] = Status.WARN

    min_total_gib: NotNegative = 0.0
    max_total_gib: NotNegative | None = None
    max_used_percent: Percent = 50.0

    def collect(self, context: CheckContext) -> SwapSeen:
        """Read /proc/meminfo."""
        fields = read_meminfo(context)
        return SwapSeen(total_kib=field(fields, "SwapTotal"), free_kib=field(fields, "SwapFree"))

    def judge(self, seen: SwapSeen) -> Finding:
        """The size is the node's; what fills it is a job's."""
        total_gib = round(seen.total_kib / _KIB_PER_GIB, 2)
        if total_gib < self.min_total_gib:
            return node_fault(f"{total_gib:g} GiB of swap, limit {self.min_total_gib:g}")
        if self.max_total_gib is not None and total_gib > self.max_total_gib:
            return node_fault(f"{total_gib:g} GiB of swap, no more than {self.max_total_gib:g}")
        used = 100 * (1 - seen.free_kib / seen.total_kib) if seen.total_kib else 0.0
        if used > self.max_used_percent:
            return user_fault(
                f"{used:.0f} % of swap in use, limit {self.max_used_percent:g}",
                used_percent=round(used, 1),
            )
        return passed(f"{total_gib:g} GiB of swap, {used:.0f} % in use", total_gib=total_gib)


class EdacSeen(Seen, frozen=True, kw_only=True):
    """Errors since the driver was loaded, per memory controller: (corrected, uncorrected)."""

    controllers: dict[str, tuple[int, int]]


class Edac(Check, frozen=True, kw_only=True):
    """Memory errors that the EDAC driver counted since it was loaded."""

    SEEN: ClassVar[type[Seen]] = EdacSeen
    TOGETHER: ClassVar[bool] = True
    COMPONENTS: ClassVar[tuple[str, ...]] = _COMPUTE

    max_uncorrected: Count = 0
    max_corrected: Count = 1000

    def collect(self, context: CheckContext) -> EdacSeen:
        """Read /sys/devices/system/edac/mc."""
        base = "/sys/devices/system/edac/mc"
        controllers = {}
        for name in context.entries(base):
            if name.startswith("mc") and name[2:].isdigit():
                counts = [context.read(f"{base}/{name}/{kind}_count") for kind in ("ce", "ue")]
                controllers[name] = (int(counts[0]), int(counts[1]))
        if not controllers:
            raise Unmeasured(f"{base} has no memory controller: the EDAC driver is not loaded")
        return EdacSeen(controllers=controllers)

    def judge(self, seen: EdacSeen) -> Finding:
        """An uncorrected error is a fault; many corrected ones are worth a look."""
        parts = [self._controller(name, *counts) for name, counts in seen.controllers.items()]
        return joined(parts, well=f"{len(parts)} memory controllers without errors to speak of")

    def _controller(self, name: str, corrected: int, uncorrected: int) -> Finding:
        if uncorrected > self.max_uncorrected:
            return node_fault(
                f"{name}: {uncorrected} uncorrected memory errors, limit {self.max_uncorrected}",
                uncorrected=uncorrected,
            )
        if corrected > self.max_corrected:
            return warned(f"{name}: {corrected} corrected memory errors", corrected=corrected)
        return passed(name)


class HugePagesSeen(Seen, frozen=True, kw_only=True):
    """Huge pages per size in KiB: (reserved, free)."""

    pages: dict[str, tuple[int, int]]


class HugePages(Check, frozen=True, kw_only=True):
    """Huge pages that an earlier job reserved and nobody gave back."""

    SEEN: ClassVar[type[Seen]] = HugePagesSeen
    TOGETHER: ClassVar[bool] = True
    SEVERITY: ClassVar[Status] = Status.USER_FAULT
    CONTEXTS: ClassVar[tuple[str, ...]] = ("prolog", "epilog")

    max_reserved_gib: NotNegative = 0.0

    def collect(self, context: CheckContext) -> HugePagesSeen:
        """Read /sys/kernel/mm/hugepages."""
        base = "/sys/kernel/mm/hugepages"
        pages = {}
        for name in context.entries(base):
            size = name.removeprefix("hugepages-").removesuffix("kB")
            if size.isdigit():
                reserved = int(context.read(f"{base}/{name}/nr_hugepages"))
                free = int(context.read(f"{base}/{name}/free_hugepages"))
                pages[size] = (reserved, free)
        if not pages:
            raise Unmeasured(f"{base} has no page sizes")
        return HugePagesSeen(pages=pages)

    def judge(self, seen: HugePagesSeen) -> Finding:
        """More than the site's own reserve was left by a job."""
        reserved_gib = sum(
            int(size) * count / _KIB_PER_GIB for size, (count, _) in seen.pages.items()
        )
        reserved_gib = round(reserved_gib, 3)
        if reserved_gib > self.max_reserved_gib:
            return user_fault(
                f"{reserved_gib:g} GiB in huge pages, limit {self.max_reserved_gib:g}",
                reserved_gib=reserved_gib,
            )
        return passed(f"{reserved_gib:g} GiB in huge pages", reserved_gib=reserved_gib)
