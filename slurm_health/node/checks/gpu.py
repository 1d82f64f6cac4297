# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: all there, none asking for a reset, no errors, all links, nobody's leftovers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Count, Seen, first_few
from slurm_health.node.rules.finding import (
    Finding,
    Remedy,
    Status,
    inconclusive,
    joined,
    mended_by,
    node_fault,
    passed,
    user_fault,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted
from slurm_health.system.nvml import GpuDevice, Gpus, read_gpus

# Names of nvml.h's nvmlGpuRecoveryAction_t.
_RECOVERY = {
    1: "a reset",
    2: "a reboot of the node",
    3: "its peers drained",
    4: "a drain and a reset",
}
_WANTS_REBOOT = 2
# Bits of nvml.h's clocks event reasons. The power cap is normal under load and is not among them.
_SLOWED = {0x8: "hardware slowdown", 0x40: "hardware thermal", 0x80: "power brake"}
_WARM = 0x20
_IDLE = 0x1
_LINKS_TRAIN_S = 600.0  # after a boot; whole racks report links that are down until then


class GpusSeen(Seen, frozen=True, kw_only=True):
    """What NVML says, and which GPUs Slurm gives the job (empty where there is no job).

    `retest` is set where a node that was drained is to show that it is well. `uptime_s` is
    since the node was booted, None where that is not known.
    """

    gpus: Gpus
    allotted: tuple[int, ...] = ()
    retest: bool = False
    uptime_s: float | None = None


class Gpu(Check, frozen=True, kw_only=True):
    """Every GPU of the node, in one pass over NVML."""

    SEEN = GpusSeen
    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    # How many there should be; 0: as many as Slurm counts on for the job.
    count: Count = 0
    max_uncorrected: Count = 0
    # Active NVLinks of each GPU; 0: not judged.
    nvlinks: Count = 0
    # 0: as wide as GPU and slot allow.
    min_pcie_width: Count = 0
    # Judged while a GPU is busy: an idle one lowers it. 0: not judged.
    min_pcie_generation: Count = 0
    # The version of the driver; empty: any.
    driver: str = ""
    fabric: bool = True
    throttling: Annotated[str, msgspec.Meta(pattern="^(warn|fault|ignore)$")] = "warn"

    def collect(self, machine: CheckContext) -> GpusSeen:
        """Ask NVML."""
        booted = machine.boot_time()
        return GpusSeen(
            gpus=read_gpus(),
            allotted=allotted(machine),
            retest=machine.context == "retest",
            uptime_s=booted.uptime_s if booted else None,
        )

    def judge(self, seen: GpusSeen) -> Finding:
        """Judge the whole, then each GPU."""
        gpus = seen.gpus
        if gpus.broken:
            return mended_by(node_fault(gpus.broken), Remedy.RELOAD)
        divided = _divided(gpus)
        expected = self.count or (0 if divided else max(seen.allotted, default=-1) + 1)
        parts = [passed("", gpus=len(gpus.devices))]
        if len(gpus.devices) < expected:
            text = f"{counted(len(gpus.devices), 'GPU')}, Slurm expects {expected}"
            parts.append(mended_by(node_fault(text, expected=expected), Remedy.REBOOT))
        if seen.retest and not expected and not divided:
            # A GPU that was at fault may be gone by now: that the others are well proves nothing.
            text = f"{len(gpus.devices)} GPUs, and how many there should be is not known: set count"
            parts.append(inconclusive(text))
        if self.driver and gpus.driver != self.driver:
            parts.append(node_fault(f"driver {gpus.driver}, expected {self.driver}"))
        parts += _without_answers(gpus.devices)
        for device in gpus.devices:
            if not device.lost:
                parts += self._device(device, seen)
        return joined(
            parts, well=f"{counted(len(gpus.devices), 'GPU')} healthy, driver {gpus.driver}"
        )

    def _device(self, device: GpuDevice, seen: GpusSeen) -> list[Finding]:
        name = _name(device)
        faults = [*self._memory(device), *self._links(device)]
        if device.recovery_action:
            wanted = _RECOVERY.get(device.recovery_action, f"action {device.recovery_action}")
            remedy = Remedy.REBOOT if device.recovery_action == _WANTS_REBOOT else Remedy.RESET
            faults.insert(0, (f"needs {wanted}", remedy))
        found = [
            mended_by(node_fault(f"{name} {text}"), remedy, device.bus) for text, remedy in faults
        ]
        return [*found, *self._nvlinks(name, device, seen), *self._throttling(name, device)]

    def _nvlinks(self, name: str, device: GpuDevice, seen: GpusSeen) -> list[Finding]:
        """Judge the links between GPUs, which are down for a moment after a boot: they train."""
        if not self.nvlinks or device.links_active is None or device.links_active >= self.nvlinks:
            return []
        down = ", ".join(map(str, device.links_down))
        text = f"{name} has {device.links_active} of {self.nvlinks} NVLinks (down: {down})"
        if seen.uptime_s is not None and seen.uptime_s < _LINKS_TRAIN_S:
            return [warned(f"{text}, {seen.uptime_s:.0f} s after the boot: they may still train")]
        return [mended_by(node_fault(text), Remedy.RESET, device.bus)]

    def _memory(self, device: GpuDevice) -> list[tuple[str, Remedy | None]]:
        found: list[tuple[str, Remedy | None]] = []
        if device.uncorrected is not None and device.uncorrected > self.max_uncorrected:
            limit = self.max_uncorrected
            text = f"has {device.uncorrected} uncorrected ECC errors, limit {limit}"
            found.append((text, Remedy.RESET))
        if device.remap_failed:
            found.append(("failed to remap a memory row", None))  # it is to be replaced
        elif device.remap_pending:
            found.append(("has a pending row remap and needs a reset", Remedy.RESET))
        return found

    def _links(self, device: GpuDevice) -> list[tuple[str, Remedy | None]]:
        found: list[tuple[str, Remedy | None]] = []
        width, most = device.pcie_width, self.min_pcie_width or device.pcie_max_width
        if width is not None and most is not None and 0 < width < most:
            found.append((f"runs on {width} PCIe lanes, limit {most}", Remedy.REBOOT))
        is_busy = device.clock_reasons is not None and not device.clock_reasons & _IDLE
        generation = device.pcie_generation
        if is_busy and generation is not None and generation < self.min_pcie_generation:
            text = f"runs PCIe generation {generation}, limit {self.min_pcie_generation}"
            found.append((text, Remedy.REBOOT))
        if self.fabric and device.fabric_state == "completed" and device.fabric_status:
            text = f"failed to join the NVLink fabric (status {device.fabric_status})"
            found.append((text, Remedy.RESET))
        return found

    def _throttling(self, name: str, device: GpuDevice) -> list[Finding]:
        found = []
        reasons = device.clock_reasons or 0
        slowed = [text for bit, text in _SLOWED.items() if reasons & bit]
        if slowed and self.throttling != "ignore":
            judged = node_fault if self.throttling == "fault" else warned
            found.append(judged(f"{name} is throttled: {', '.join(slowed)}"))
        elif reasons & _WARM and self.throttling != "ignore":
            found.append(warned(f"{name} is throttled by temperature"))
        if self.fabric and device.fabric_state in {"not started", "in progress"}:
            found.append(warned(f"{name}: joining the NVLink fabric is {device.fabric_state}"))
        return found


class GpuProcesses(Check, frozen=True, kw_only=True):
    """Processes on the GPUs that Slurm gives the job, or has just taken back from one."""

    SEEN = GpusSeen
    SEVERITY = Status.USER_FAULT
    CONTEXTS = ("prolog", "epilog")

    def collect(self, machine: CheckContext) -> GpusSeen:
        """Ask NVML about the job's GPUs only: other jobs may be at work on the others."""
        wanted = allotted(machine)
        if not wanted:
            raise Unmeasured("Slurm gave the job no GPU on this node")
        gpus = read_gpus()
        if _divided(gpus):
            raise Unmeasured("the GPUs are divided (MIG), so Slurm's numbers do not name them")
        return GpusSeen(gpus=gpus, allotted=wanted)

    def judge(self, seen: GpusSeen) -> Finding:
        """Nobody should be there."""
        parts = []
        for device in seen.gpus.devices:
            if device.index not in seen.allotted:
                continue
            if device.processes is None:
                why = device.lost or device.unanswered or "not supported"
                text = f"{_name(device)} does not tell which processes use it: {why}"
                parts.append(inconclusive(text))
            elif device.processes:
                text = f"GPU {device.index} is in use by PID {first_few(device.processes)}"
                parts.append(user_fault(text))
        return joined(parts, well="no processes on the job's GPUs")


def _name(device: GpuDevice) -> str:
    return f"GPU {device.index}{f' ({device.bus})' if device.bus else ''}"


def _without_answers(devices: Sequence[GpuDevice]) -> list[Finding]:
    """Return what is said of GPUs that have gone or answer with errors.

    A GPU that NVML calls lost is proven by the others, which answer; so is one that has nothing
    but an unknown error for every question. Where none does, a driver that is being updated or a
    reset of all of them looks the same.
    """
    lost = [device for device in devices if device.lost]
    is_proven = len(lost) < len(devices) or len(devices) == 1
    judged = node_fault if is_proven else inconclusive
    said = "is lost" if is_proven else "cannot be asked, nor can any other"
    is_answered = any(not device.lost and not device.unanswered for device in devices)
    return [
        *(
            mended_by(judged(f"{_name(device)} {said}: {device.lost}"), Remedy.REBOOT, device.bus)
            for device in lost
        ),
        *(
            mended_by(
                (node_fault if device.silent and is_answered else inconclusive)(
                    f"{_name(device)} cannot be asked: {device.unanswered}"
                ),
                Remedy.REBOOT,
                device.bus,
            )
            for device in devices
            if device.unanswered
        ),
    ]


def _divided(gpus: Gpus) -> bool:
    """Tell whether Slurm may count instances (MIG) where NVML counts GPUs."""
    return any(each.mig for each in gpus.devices)


def allotted(machine: CheckContext) -> tuple[int, ...]:
    """Return the GPUs of the job, by the numbers they have outside it; empty where none is told."""
    words = machine.environ.get("SLURM_JOB_GPUS", "").split(",")
    return tuple(int(word) for word in words if word.isdecimal())
