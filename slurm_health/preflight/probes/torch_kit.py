# SPDX-License-Identifier: Apache-2.0
"""The kit of workers that have torch: its devices, its process groups, its store.

By which way data goes between nodes is what NCCL says of itself, or the interface of gloo: NCCL has
no call for it, but logs it for each connection. It writes its log into memory, where it is read.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slurm_health.preflight.probes import adapters, load
from slurm_health.preflight.probes import device as devices_of
from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.membership import Membership

if TYPE_CHECKING:
    from slurm_health.preflight.probes.kits import Measure, OpenStore, Store

_OWN_LOG = "/proc/self/fd/"
# n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
# By way of a neighbour (PXN) the rank of that follows: NET/IB/3(2)/GDRDMA. A plugin's name may have
# a space: NET/AWS Libfabric/0/GDRDMA
_WAY = re.compile(r" via (NET/\w+(?: \w+)*)/\d+(?:\(\d+\))?(/GDRDMA)?")


class TorchKit:
    """As `kits.Kit` says; `threads` are those of a worker on CPUs."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        torch.set_num_threads(threads)
        record_ways(os.environ)

    @property
    def version(self) -> str:
        """The version of torch."""
        return str(torch.__version__)

    def claim(self, local_rank: int, *, devices: int, environ: Mapping[str, str]) -> torch.device:
        """Return the device of a worker, made current, after a first product on it."""
        return devices_of.claim(local_rank, expected=devices, environ=environ)

    def serve_store(self) -> tuple[object, int]:
        """Serve a store."""
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return store, int(store.port)

    def facts(
        self, device: torch.device, *, devices: int, environ: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return what the event `ready` says of a worker."""
        gflop_per_s, memory_gb_per_s = devices_of.speeds(device)
        return {
            "torch": self.version,
            "backend": devices_of.backend(device),
            "device": devices_of.name(device),
            "model": devices_of.model(device, self._threads),
            "free_bytes": devices_of.memory_bytes(device)[0],
            "gflop_per_s": round(gflop_per_s, 3),
            "memory_gb_per_s": round(memory_gb_per_s, 3),
            "collective_library": devices_of.collective_library(device),
            "ports_gbit_per_s": adapters.ports_gbit_per_s(environ) if devices else [],
            # The first speaks for the node, and no other has to ask the driver.
            "nvlink_domain": devices_of.nvlink_domain(device) if device.index == 0 else "",
        }

    def open_store(self, timeout: timedelta) -> OpenStore:
        """Return what connects to the store of another worker."""

        def connect(address: str, port: int) -> Callable[[str], Store]:
            store = dist.TCPStore(
                address, port, None, False, timeout=timeout, wait_for_workers=False
            )
            return functools.partial(_part, store)

        return connect

    def membership(self, device: torch.device) -> Membership:
        """Return the group of a worker: none as yet."""
        return Membership(device)

    def context(self, membership: Membership, **fields: Any) -> ProbeContext:  # noqa: ARG002 - torch knows its groups
        """Return what a probe is given."""
        return ProbeContext(**fields)

    def measure_of(self, name: str, path: str) -> Measure:
        """Return what runs a probe."""
        return load.measure_of(name, path)

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""
        return devices_of.is_out_of_memory(err)

    def users(self, device: torch.device) -> str:
        """Return which other processes use a device."""
        return devices_of.users(device.index) if device.type == "cuda" else ""

    def ways(self, device: torch.device, environ: Mapping[str, str]) -> str:
        """Return by which ways data has gone so far."""
        return ways_used(environ, on_cuda=device.type == "cuda")

    def is_replaced(self, device: torch.device) -> bool:
        """Tell whether a worker with such a device is replaced after what may have spoilt it."""
        return devices_of.backend(device) != "gloo"


def _part(store: Any, prefix: str) -> Store:
    part: Store = dist.PrefixStore(prefix, store)
    return part


def record_ways(environ: MutableMapping[str, str]) -> None:
    """Have NCCL write of its network into memory, unless the user wants its log elsewhere."""
    if "NCCL_DEBUG" in environ or "NCCL_DEBUG_FILE" in environ:
        return
    environ["NCCL_DEBUG"] = "INFO"
    environ["NCCL_DEBUG_SUBSYS"] = "NET"
    environ["NCCL_DEBUG_FILE"] = f"{_OWN_LOG}{os.memfd_create('nccl-log')}"


def ways_used(environ: Mapping[str, str], *, on_cuda: bool) -> str:
    """Return the ways by which data has gone so far, empty where that is not known."""
    if not on_cuda:
        return environ.get("GLOO_SOCKET_IFNAME", "")
    log = environ.get("NCCL_DEBUG_FILE", "")
    if not log.startswith(_OWN_LOG):
        return ""
    found = _WAY.findall(Path(log).read_text(errors="replace"))
    ways = (way + (" with GPUDirect RDMA" if direct else "") for way, direct in found)
    return " and ".join(sorted(set(ways)))
