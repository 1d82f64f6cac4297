# SPDX-License-Identifier: Apache-2.0
"""AMD GPUs: all there, no uncorrected errors, not throttled, all XGMI links; by `amd-smi`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, Count, Seen
from slurm_health.node.checks.external import json_in, run_program
from slurm_health.node.checks.gpu import allotted
from slurm_health.node.rules.finding import (
    Finding,
    Remedy,
    inconclusive,
    joined,
    mended_by,
    node_fault,
    passed,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

# A document of all metrics of eight GPUs has some 100 KiB.
_OUTPUT_BYTES = 4 << 20
# Of amd-smi's violations; its power cap (ppt) is normal under load and is not among them.
_SLOWED = {
    "prochot_violation_status": "processor hot",
    "socket_thermal_violation_status": "heat of the socket",
    "vr_thermal_violation_status": "heat of a voltage regulator",
    "hbm_thermal_violation_status": "heat of the memory",
}


class AmdGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: it does not say."""

    index: int
    bus: str = ""
    uncorrected: int | None = None
    slowed_by: tuple[str, ...] = ()
    # GPUs that it reaches over XGMI, and those to which the way is shut.
    linked: int | None = None


class AmdGpusSeen(Seen, frozen=True, kw_only=True):
    """What amd-smi says, and which GPUs Slurm gives the job (empty where there is no job)."""

    gpus: tuple[AmdGpu, ...]
    allotted: tuple[int, ...] = ()
    retest: bool = False


class AmdGpus(Check, frozen=True, kw_only=True):
    """Every AMD GPU of the node."""

    SEEN = AmdGpusSeen
    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    program: str = "amd-smi"
    # How many there should be; 0: as many as Slurm counts on for the job.
    count: Count = 0
    max_uncorrected: Count = 0
    # Other GPUs that each reaches over XGMI; 0: not judged.
    xgmi_peers: Count = 0
    throttling: Annotated[str, msgspec.Meta(pattern="^(warn|fault|ignore)$")] = "warn"

    def collect(self, machine: CheckContext) -> AmdGpusSeen:
        """Ask amd-smi for all metrics, and for the links where they are judged."""
        gpus = read_amd_gpus(machine, self.program, links=bool(self.xgmi_peers))
        return AmdGpusSeen(
            gpus=gpus, allotted=allotted(machine), retest=machine.context == "retest"
        )

    def judge(self, seen: AmdGpusSeen) -> Finding:
        """Judge the whole, then each GPU."""
        expected = self.count or max(seen.allotted, default=-1) + 1
        parts = [passed("", gpus=len(seen.gpus))]
        if len(seen.gpus) < expected:
            text = f"{counted(len(seen.gpus), 'AMD GPU')}, expected {expected}"
            parts.append(node_fault(text, expected=expected))
        if seen.retest and not expected:
            text = f"{len(seen.gpus)} GPUs, and how many there should be is not known: set count"
            parts.append(inconclusive(text))
        for gpu in seen.gpus:
            parts += self._gpu(gpu)
        return joined(parts, well=f"{counted(len(seen.gpus), 'AMD GPU')} healthy")

    def _gpu(self, gpu: AmdGpu) -> list[Finding]:
        name = f"GPU {gpu.index}{f' ({gpu.bus})' if gpu.bus else ''}"
        found = []
        if gpu.uncorrected is not None and gpu.uncorrected > self.max_uncorrected:
            text = f"{gpu.uncorrected} uncorrected ECC errors, limit {self.max_uncorrected}"
            fault = node_fault(f"{name} has {text}", uncorrected=gpu.uncorrected)
            # The driver has reset the GPU by itself; what it cannot recover from, it says, needs a
            # reboot (kernel documentation of amdgpu, RAS), and so does the count to begin anew.
            found.append(mended_by(fault, Remedy.REBOOT))
        if gpu.linked is not None and gpu.linked < self.xgmi_peers:
            text = f"reaches {gpu.linked} of {self.xgmi_peers} GPUs over XGMI"
            found.append(node_fault(f"{name} {text}"))
        if gpu.slowed_by and self.throttling != "ignore":
            judged = node_fault if self.throttling == "fault" else warned
            found.append(judged(f"{name} is throttled: {', '.join(gpu.slowed_by)}"))
        return found


def read_amd_gpus(
    machine: CheckContext, program: str = "amd-smi", *, links: bool = True
) -> tuple[AmdGpu, ...]:
    """Return what amd-smi says of each GPU.

    Raises:
        Unmeasured: it is not there, has no driver, or says nothing that can be read.
    """
    metrics = _asked(machine, program, "metric")
    linked = _links(_asked(machine, program, "topology")) if links else {}
    return tuple(
        AmdGpu(
            index=index,
            bus=str(each["bdf"]) if "bdf" in each else "",
            uncorrected=_whole(_table(each, "ecc").get("total_uncorrectable_count")),
            slowed_by=tuple(
                words
                for key, words in _SLOWED.items()
                if _table(each, "throttle").get(key) == "ACTIVE"
            ),
            linked=linked.get(index),
        )
        for each in metrics
        if (index := _whole(each.get("gpu"))) is not None
    )


def _asked(machine: CheckContext, program: str, what: str) -> list[Mapping[str, Any]]:
    """Return a table for each GPU: ROCm 6 prints a list of them, ROCm 7 an object with it."""
    seen = run_program([program, what, "--json"], machine, most_bytes=_OUTPUT_BYTES)
    document = json_in(seen.output)
    if isinstance(document, dict):
        document = next((each for each in document.values() if isinstance(each, list)), None)
    if not isinstance(document, list):
        raise Unmeasured(f"{program} {what}: {seen.said or f'exit code {seen.code}'}")
    return [each for each in document if isinstance(each, dict)]


def _links(topology: list[Mapping[str, Any]]) -> dict[int, int]:
    """Return how many others each GPU reaches over XGMI."""
    found = {}
    for each in topology:
        index, links = _whole(each.get("gpu")), each.get("links")
        if index is not None and isinstance(links, list):
            found[index] = sum(
                link.get("link_type") == "XGMI" and link.get("link_status") != "DISABLED"
                for link in links
                if isinstance(link, dict)
            )
    return found


def _table(gpu: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one part of what is said of a GPU, empty where it says `N/A`."""
    part = gpu.get(name)
    return part if isinstance(part, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
