# SPDX-License-Identifier: Apache-2.0
"""The faults of played GPUs: described once, they show in CUDA, NCCL, NVML and the kernel's log."""

from typing import TYPE_CHECKING

from tests.played_gpu import kernel_log
from tests.played_gpu.description import Fault, Machine, with_faults, write

from . import gpus
from .errors import LabError

if TYPE_CHECKING:
    from .inside import Inside

_UNKNOWN = 999  # of CUDA and of NVML
_ECC = 214  # cudaErrorECCUncorrectable


class GpuFaults:
    """Breaks the GPUs of a lab's nodes. `device` is the number that a node gives its GPU."""

    def __init__(self, lab: "Inside") -> None:
        self._lab = lab

    def gpus_of(self, node: str) -> Machine:
        """The node's GPUs as they are described now, with what is broken in them."""
        return gpus.described(self._lab.spec, node)

    def gpu(self, node: str, *faults: Fault) -> None:
        """Break GPUs as tests.played_gpu.description says.

        Raises:
            LabError: no such GPU.
        """
        self._lab.pid(node)
        spec = self._lab.spec
        before = self.gpus_of(node)
        for fault in faults:
            if not 0 <= fault.device < spec.gpus:
                raise LabError(f"no GPU {fault.device}: a node has {spec.gpus}, from 0")
        write(gpus.description(spec, node), with_faults(before, *faults))
        gpus.say(
            spec,
            node,
            [
                message
                for fault in faults
                for message in kernel_log.said(before.devices[fault.device], fault)
            ],
        )

    def gpu_fault(
        self, node: str, device: int, kind: str, *, value: float = 0.0, after: float = 0.0
    ) -> None:
        """It has a fault of any kind that tests/played_gpu/README.md lists."""
        self.gpu(node, Fault(device=device, kind=kind, value=value, after=after))

    def gpu_dead(self, node: str, device: int = 0) -> None:
        """It cannot be opened, NVML answers with errors only, and its firmware says nothing."""
        self.gpu(
            node,
            Fault(device=device, kind="open_error", value=_UNKNOWN),
            Fault(device=device, kind="nvml_error", value=_UNKNOWN),
        )

    def gpu_vanish(self, node: str, device: int = 0) -> None:
        """It falls off the bus at its next operation, and is lost to NVML."""
        self.gpu(node, Fault(device=device, kind="off_bus"))

    def gpu_hot(self, node: str, device: int = 0, share: float = 0.5, after_s: float = 0.5) -> None:
        """After so many seconds of work it is too hot, and computes at this share of its speed."""
        self.gpu(node, Fault(device=device, kind="throttle", value=share, after=after_s))

    def gpu_ecc(self, node: str, device: int = 0, after: int = 0) -> None:
        """Its memory has an error that cannot be corrected, met after so many operations."""
        self.gpu(node, Fault(device=device, kind="sticky_error", value=_ECC, after=after))

    def gpu_divided(self, node: str, device: int = 0) -> None:
        """Somebody has divided it (MIG): a process sees one part, and NCCL connects none."""
        self.gpu(node, Fault(device=device, kind="mig_mode", value=1))

    def gpu_occupied(self, node: str, device: int = 0, share: float = 0.97) -> None:
        """A process of bob's, which Slurm knows nothing of, holds this share of its memory."""
        sleeper = "setsid sleep infinity </dev/null >/dev/null 2>&1 & echo $!"
        started = self._lab.run(["sh", "-c", sleeper], user="bob", node=node)
        held = int(self.gpus_of(node).devices[device].memory_bytes * share)
        self.gpu(
            node,
            Fault(device=device, kind="memory_used", value=held),
            Fault(device=device, kind="occupied_by", value=int(started.stdout)),
        )

    def mend_gpus(self, node: str) -> None:
        """Undo all of these on a node; harmless where the lab has no GPUs."""
        spec = self._lab.spec
        if not spec.gpus:
            return
        for fault in self.gpus_of(node).faults:
            if fault.kind == "occupied_by":
                self._lab.run(["kill", f"{fault.value:.0f}"], node=node, check=False)
        gpus.mend(spec, node)
