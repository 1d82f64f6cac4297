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


class GpuFaults:
    """Breaks the GPUs of a lab's nodes. `device` is the number that a node gives its GPU."""

    def __init__(self, lab: "Inside") -> None:
        self._lab = lab

    def gpus_of(self, node: str) -> Machine:
        """The node's GPUs as they are described now, with what is broken in them."""
        return gpus.described(self._lab.spec, node)

    def gpu(self, node: str, *faults: Fault) -> None:
        """Break GPUs as tests.played_gpu.description says."""
        self._lab.pid(node)
        spec = self._lab.spec
        before = self.gpus_of(node)
        for fault in faults:
            if not 0 <= fault.device < spec.gpus:
                raise LabError(f"no GPU {fault.device}: a node has {spec.gpus}, from 0")
        write(gpus.description(spec, node), with_faults(before, *faults))
        told = [kernel_log.said(before.devices[fault.device], fault) for fault in faults]
        gpus.say(spec, node, [message for messages in told for message in messages])

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
