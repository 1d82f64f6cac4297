# SPDX-License-Identifier: Apache-2.0
"""The kit of workers without torch: this node's processors, numpy and sockets.

It sees neither GPUs nor NCCL, and says so in the run's journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slurm_health.preflight.probes import host, kits, light_ring
from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.light_ring import LightContext, RingMembership

if TYPE_CHECKING:
    from slurm_health.preflight.probes.kits import Measure, OpenStore

BACKEND = "tcp"
# The module of each probe, and its function there.
_PROBES = {
    "values": ("light_compute", "values"),
    "matmul": ("light_compute", "matmul"),
    "memory_copy": ("light_memory", "copy"),
    "memory_pattern": ("light_memory", "pattern"),
    "node_allgather": ("light_exchange", "allgather"),
    "rail_allgather": ("light_exchange", "allgather"),
    "allgather": ("light_exchange", "allgather"),
}
# By these the libraries that numpy may multiply with are told to use one thread: ours are several.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


class Processors:
    """The device of a light worker. It has no more of torch's than a probe asks of any device.

    `threads` are those that compute on it.
    """

    type = "cpu"
    index = None

    def __init__(self, threads: int) -> None:
        self.threads = threads


class LightKit:
    """As `kits.Kit` says; `threads` are those of a worker."""

    version = ""

    def __init__(self, threads: int) -> None:
        os.environ.update(dict.fromkeys(_THREADS, "1"))
        from slurm_health.preflight.probes import light_compute  # numpy reads these when loaded

        self._numpy = light_compute.NUMPY_VERSION
        self._threads = threads

    def claim(self, local_rank: int, *, devices: int, environ: Mapping[str, str]) -> Processors:  # noqa: ARG002 - there is one kind
        """Return the device of a worker."""
        return Processors(self._threads)

    def serve_store(self) -> tuple[object, int]:
        """Serve a store."""
        return light_ring.serve()

    def facts(self, device: Processors, **_: object) -> dict[str, Any]:
        """Return what the event `ready` says of a worker.

        Nodes with another numpy are not compared with it: the model tells them apart.
        """
        return {
            "torch": "",
            "backend": BACKEND,
            "device": device.type,
            "model": f"{host.model(self._threads)}, numpy {self._numpy}",
            "free_bytes": host.memory_bytes()[0],
            "collective_library": "",
        }

    def open_store(self, timeout: timedelta) -> OpenStore:
        """Return what connects to the store of another worker."""

        def connect(address: str, port: int) -> Callable[[str], light_ring.LightStore]:
            return light_ring.opened(address, port, timeout).store

        return connect

    def membership(self, device: Processors) -> RingMembership:  # noqa: ARG002 - there is one kind
        """Return the group of a worker: none as yet."""
        return RingMembership()

    def context(self, membership: RingMembership, **fields: Any) -> ProbeContext:
        """Return what a probe is given."""
        return LightContext(**{**fields, "group": fields.get("group") or membership.whole})

    def measure_of(self, name: str, path: str) -> Measure | None:
        """Return what runs a probe; of a site's own, None for one that needs torch."""
        if path:
            try:
                return kits.measure_of(name, path)
            except kits.NeedsTorch:
                return None
        if name not in _PROBES:
            return None
        return kits.function_of(*_PROBES[name])

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""
        return isinstance(err, MemoryError)

    def users(self, device: Processors) -> str:  # noqa: ARG002 - processors are everybody's
        """Return which other processes use a device: nothing that would explain an error."""
        return ""

    def ways(self, device: Processors, environ: Mapping[str, str]) -> str:  # noqa: ARG002
        """Return by which ways data has gone so far."""
        return environ.get("GLOO_SOCKET_IFNAME", "")

    def is_replaced(self, device: Processors) -> bool:  # noqa: ARG002 - as for all processors
        """Tell whether a worker is replaced after what may have spoilt it: processors are not."""
        return False
