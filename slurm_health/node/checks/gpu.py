# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs: all there, none needs a reset, no errors, all links, no leftovers."""

from __future__ import annotations

from collections.abc import Iterator

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotApplicable,
    Weight,
    first_few,
)
from slurm_health.node.rules.finding import (
    Finding,
    Remedy,
    Status,
    inconclusive,
    joined,
    node_fault,
    passed,
    user_fault,
    warned,
    with_remedy,
)
from slurm_health.node.rules.kernel_lines import address
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
_LOST = "GPU is lost"


class Gpu(Check, frozen=True, kw_only=True):
    """All NVIDIA GPUs in one pass over NVML; needs the extra `gpu`.

    A node fault: a GPU that is lost, needs a reset or reboot, failed to remap a row or has one
    left, runs on fewer PCIe lanes than it could, or failed to join its NVLink fabric; a driver
    that is not loaded or does not match its library. What a GPU does not report is not held
    against it. If none of several GPUs answers, as during a reset, the check is inconclusive.
    """

    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    # How many there should be; 0: as many as Slurm expects for the job. A retest that knows no
    # number does not pass, so set it.
    count: Count = 0
    # Uncorrected ECC errors since the last reset; more is a node fault.
    max_uncorrected: Count = 0
    # Active NVLinks of each GPU; fewer is a node fault, in the ten minutes after a boot a warning.
    # 0: not judged.
    nvlinks: Count = 0
    # Judged while a GPU is busy: an idle one lowers it. 0: not judged.
    min_pcie_generation: Count = 0
    # The exact version; empty: any.
    driver: str = ""
    # Slowdown by hardware, heat or power brake. The power cap never counts.
    throttling: Weight = "warn"

    def measure(self, machine: CheckContext) -> Finding:
        """Ask NVML."""
        return self.judge(
            read_gpus(),
            allotted=allotted(machine),
            is_retest=machine.context == "retest",
            is_settled=machine.is_settled(),
        )

    def judge(
        self,
        gpus: Gpus,
        *,
        allotted: tuple[int, ...] = (),
        is_retest: bool = False,
        is_settled: bool = True,
    ) -> Finding:
        """Judge the driver and the count, then every GPU. Pure.

        A GPU that NVML calls lost is proven if others answer; so is one that has only an unknown
        error for every question. If none answers, an update of the driver or a reset of all GPUs
        looks the same.

        Args:
            gpus: from NVML.
            allotted: the GPUs that Slurm gives the job; none if there is no job.
            is_retest: whether a drained node has to prove that it is healthy.
            is_settled: whether the boot is long ago: links train for some minutes after it.
        """
        if gpus.broken:
            return with_remedy(node_fault(gpus.broken), Remedy.REBOOT)
        # Slurm may count instances (MIG) where NVML counts GPUs.
        divided, number = any(device.mig for device in gpus.devices), len(gpus.devices)
        expected = self.count or (0 if divided else max(allotted, default=-1) + 1)
        parts = [passed("", gpus=number)]
        if number < expected:
            text = f"{counted(number, 'GPU')}, Slurm expects {expected}"
            parts.append(with_remedy(node_fault(text, expected=expected), Remedy.REBOOT))
        if is_retest and not expected and not divided:
            # The faulty GPU may be gone by now: the others prove nothing.
            text = f"{number} GPUs, and the expected number is unknown: set count"
            parts.append(inconclusive(text))
        if self.driver and gpus.driver != self.driver:
            parts.append(node_fault(f"driver {gpus.driver}, expected {self.driver}"))
        is_proven = number == 1 or not all(device.lost for device in gpus.devices)
        answered = any(not device.lost and not device.unanswered for device in gpus.devices)
        for device in gpus.devices:
            if device.lost and is_proven:
                text = "lost" if device.lost == _LOST else f"lost: {device.lost}"
                lost = node_fault(_of(device, text))
                parts.append(with_remedy(lost, Remedy.REBOOT, device.bus))
            elif device.lost:
                text = f"cannot be asked, nor can any other: {device.lost}"
                lost = inconclusive(_of(device, text))
                parts.append(with_remedy(lost, Remedy.REBOOT, device.bus))
            elif device.unanswered:
                judged = node_fault if device.silent and answered else inconclusive
                mute = judged(_of(device, f"cannot be asked: {device.unanswered}"))
                parts.append(with_remedy(mute, Remedy.REBOOT, device.bus))
            if not device.lost:
                parts += self._device(device, is_settled)
        return joined(parts, well=f"{counted(number, 'GPU')} healthy, driver {gpus.driver}")

    def _device(self, device: GpuDevice, is_settled: bool) -> Iterator[Finding]:
        def fault(text: str, remedy: Remedy | None) -> Finding:
            return with_remedy(node_fault(_of(device, text)), remedy, device.bus)

        if action := device.recovery_action:
            remedy = Remedy.REBOOT if action == _WANTS_REBOOT else Remedy.RESET
            yield fault(f"needs {_RECOVERY.get(action, f'action {action}')}", remedy)
        if device.uncorrected is not None and device.uncorrected > self.max_uncorrected:
            text = f"has {device.uncorrected} uncorrected ECC errors, limit {self.max_uncorrected}"
            yield fault(text, Remedy.RESET)
        if device.remap_failed:
            yield fault("failed to remap a memory row", None)  # it is to be replaced
        elif device.remap_pending:
            yield fault("has a pending row remap and needs a reset", Remedy.RESET)
        width, widest = device.pcie_width, device.pcie_max_width
        if width is not None and widest is not None and 0 < width < widest:
            yield fault(f"runs on {width} PCIe lanes, limit {widest}", Remedy.REBOOT)
        is_busy = device.clock_reasons is not None and not device.clock_reasons & _IDLE
        generation, least = device.pcie_generation, self.min_pcie_generation
        if is_busy and generation is not None and generation < least:
            yield fault(f"runs PCIe generation {generation}, limit {least}", Remedy.REBOOT)
        yield from self._links(device, is_settled)
        reasons = device.clock_reasons or 0
        slowed = [text for bit, text in _SLOWED.items() if reasons & bit]
        if slowed and self.throttling != "ignore":
            judged = node_fault if self.throttling == "fault" else warned
            yield judged(_of(device, f"is throttled: {', '.join(slowed)}"))
        elif reasons & _WARM and self.throttling != "ignore":
            yield warned(_of(device, "is throttled by temperature"))

    def _links(self, device: GpuDevice, is_settled: bool) -> Iterator[Finding]:
        active = device.links_active
        if self.nvlinks and active is not None and active < self.nvlinks:
            down = ", ".join(map(str, device.links_down))
            text = _of(device, f"has {active} of {self.nvlinks} NVLinks (down: {down})")
            if is_settled:
                yield with_remedy(node_fault(text), Remedy.RESET, device.bus)
            else:
                yield warned(f"{text}; soon after a boot they may still train")
        if device.fabric_state == "completed" and device.fabric_status:
            text = f"failed to join the NVLink fabric (status {device.fabric_status})"
            yield with_remedy(node_fault(_of(device, text)), Remedy.RESET, device.bus)
        elif device.fabric_state in {"not started", "in progress"}:
            yield warned(_of(device, f"has not joined the NVLink fabric: {device.fabric_state}"))


class GpuProcesses(Check, frozen=True, kw_only=True):
    """Processes on the GPUs that Slurm gives the job, or has just taken back from one.

    Not applicable without GPUs, and where one is divided (MIG).
    """

    SEVERITY = Status.USER_FAULT
    CONTEXTS = ("prolog", "epilog")

    def measure(self, machine: CheckContext) -> Finding:
        """Ask NVML about the job's GPUs only: other jobs may be at work on the others."""
        wanted = allotted(machine)
        if not wanted:
            raise NotApplicable("Slurm gave the job no GPU on this node")
        gpus = read_gpus()
        if any(device.mig for device in gpus.devices):
            raise NotApplicable("the GPUs are divided (MIG), so Slurm's numbers do not name them")
        parts = []
        for device in gpus.devices:
            if device.index not in wanted:
                continue
            if device.processes is None:
                why = device.lost or device.unanswered or "not supported"
                text = f"does not report which processes use it: {why}"
                parts.append(inconclusive(_of(device, text)))
            elif device.processes:
                text = f"GPU {device.index} is in use by PID {first_few(device.processes)}"
                parts.append(user_fault(text))
        return joined(parts, well="no processes on the job's GPUs")


def _of(device: GpuDevice, text: str) -> str:
    """Return a text on a GPU; `sinfo -R` shows 20 columns, so its address comes last."""
    return f"GPU {device.index} {text}{f' ({address(device.bus)})' if device.bus else ''}"


def allotted(machine: CheckContext) -> tuple[int, ...]:
    """Return the GPUs of the job, by the numbers they have outside it; empty if none is known."""
    words = machine.environ.get("SLURM_JOB_GPUS", "").split(",")
    return tuple(int(word) for word in words if word.isdecimal())
