# SPDX-License-Identifier: Apache-2.0
"""The kit of workers that have torch: its devices, its process groups, its store.

Over NCCL everything that concerns partners may wait in C++ for one that is gone. So its parts are
run beside the main thread, which goes on hearing the agent; and what is waited for on the device
is interrupted by aborting the communicators, from whichever thread hears of it. A worker whose
group was aborted, and whose device still computes, is as good as before. NCCL's own answer,
non-blocking initialisation, is not used: torch took its default back because NCCL 2.26 hangs in it
now and then (pytorch/pytorch#154055).

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

from slurm_health.preflight.probes import adapters, kits
from slurm_health.preflight.probes import device as devices_of
from slurm_health.preflight.probes.context import ProbeContext

if TYPE_CHECKING:
    from slurm_health.preflight.probes.kits import Measure, OpenStore, Store
import inspect
import threading
import time

from torch.distributed import distributed_c10d

from slurm_health.preflight.probes.device import backend, still_computes

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

    def membership(self, device: torch.device) -> TorchMembership:
        """Return the group of a worker: none as yet."""
        return TorchMembership(device)

    def context(self, membership: TorchMembership, **fields: Any) -> ProbeContext:  # noqa: ARG002 - torch knows its groups
        """Return what a probe is given."""
        return ProbeContext(**fields)

    def measure_of(self, name: str, path: str) -> Measure:
        """Return what runs a probe."""
        return kits.measure_of(name, path)

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


POLL_S = 0.005
# How long one that is told to leave waits for NCCL: a partner that is killed meanwhile closes its
# connections, which ends an initialisation.
LEAVE_S = 1.0

Check = Callable[[], None]
# None before torch 2.6: a worker whose group broke is then replaced.
_abort: Callable[[Any], None] | None = getattr(distributed_c10d, "_abort_process_group", None)
_BINDS_DEVICE = "device_id" in inspect.signature(dist.init_process_group).parameters  # torch 2.3


class TorchMembership:
    """At most one process group at a time, of workers with such a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_nccl = backend(device) == "nccl"
        self._lock = threading.Lock()
        self._beside: threading.Thread | None = None
        self._formed = False

    def form(
        self, store: Any, *, rank: int, world_size: int, timeout: timedelta, check: Check
    ) -> None:
        """Form the default process group, and connect to its members' NCCL at once.

        Raises:
            RuntimeError: it failed, as where a partner is gone.
        """
        arguments: dict[str, Any] = {}
        if self._is_nccl and _BINDS_DEVICE:
            arguments["device_id"] = self._device

        def init() -> None:
            dist.init_process_group(
                backend(self._device),
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                **arguments,
            )

        self._run(init, check)
        self._formed = True

    def part(self, ranks: list[int], *, timeout: timedelta, check: Check) -> Any:
        """Return a part of the group with these ranks, which every member is in one of.

        It is formed by its own members alone, or with NCCL split off by all of them together.

        Raises:
            RuntimeError: it failed, as where a partner is gone.
        """
        found: list[Any] = []

        def form() -> None:
            found.append(dist.new_group(ranks, timeout=timeout, use_local_synchronization=True))

        self._run(form, check)
        return found[0]

    def exchange_first(self, group: Any, check: Check) -> None:
        """Make sure that a group (None: the default one) can exchange data at all.

        Most groups that fail do it here, and whoever is still in Python need not be killed.

        Raises:
            RuntimeError: the exchange failed, as one with a partner that is gone.
        """
        total = torch.ones(1, device=self._device)
        work: Any = None

        def begin() -> None:
            nonlocal work
            work = dist.all_reduce(total, group=group, async_op=True)

        self._run(begin, check)  # connections are made inside of the call
        while not work.is_completed():
            check()
            time.sleep(POLL_S)
        check()
        # What counts is the data: NCCL's wait would not raise, its work refuses is_success() (since
        # torch 2.3), and that of an aborted group is completed and has no exception.
        members, answered = dist.get_world_size(group), float(total.item())
        if answered != members:
            said = exception_of(work) or f"{answered:g} of {members} ranks added up"
            raise RuntimeError(f"the group's first exchange failed: {said}")

    def is_formed(self) -> bool:
        """Tell whether there is a process group to leave."""
        return bool(dist.is_initialized())

    def leave(self) -> None:
        """Destroy the process group, if there is one, with all its members."""
        self._formed = False
        if self.is_formed():
            dist.destroy_process_group()

    def interrupt(self) -> None:
        """End whatever the main thread waits for in the group: from another thread.

        What it waits for comes back without data, or with an error. The group is lost.
        """
        with self._lock:
            if self._formed and self._is_nccl and _abort is not None and self.is_formed():
                self._formed = False
                # By name: torch 2.6 aborts nothing where none is given.
                _abort(dist.group.WORLD)

    def leave_broken(self) -> bool:
        """Leave a group of which a member may be missing; tell whether this worker is still good.

        It is not where NCCL does not let go of it within `LEAVE_S`, or its device no longer
        computes. The first is so where a partner is gone before it has connected to the first rank:
        that waits in ncclCommInitRank, and there is no communicator yet that could be aborted.
        """
        if not self._is_nccl:
            return True
        if self._beside is not None:
            self._beside.join(LEAVE_S)
            if self._beside.is_alive():
                return False
        if _abort is None and self.is_formed():
            return False
        # An initialisation that failed has counted its group, and its members would no longer
        # agree with others on the next one's name.
        distributed_c10d._world.group_count = 0
        leaving = _Beside(self._abort_and_compute, self._device)
        leaving.join(LEAVE_S)
        return not leaving.is_alive() and leaving.error is None

    def _abort_and_compute(self) -> None:
        self._formed = True  # or about to be, when the abort came
        self.interrupt()
        self._formed = False
        still_computes(self._device)

    def _run(self, work: Callable[[], None], check: Check) -> None:
        """Run what may wait for partners, and raise what it raises, or what `check` does."""
        if not self._is_nccl:
            work()
            return
        self._beside = beside = _Beside(work, self._device)
        while beside.is_alive():
            check()
            beside.join(POLL_S)
        self._beside = None
        if beside.error is not None:
            raise beside.error


def exception_of(work: Any) -> object:
    """Return what an exchange raised; None where nothing, or where this torch cannot tell."""
    try:
        return work.exception()
    except TypeError:  # torch 2.9 and older have no form for it in Python, not even for none
        return None


class _Beside(threading.Thread):
    """Work in a thread of its own on the same device; `error` is what it raised."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        super().__init__(daemon=True)
        self._work, self._device = work, device
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        torch.cuda.set_device(self._device)  # each thread has its own
        try:
            self._work()
        except Exception as err:  # it is raised again in the main thread
            self.error = err
