# SPDX-License-Identifier: Apache-2.0
"""The group of workers with torch: formed, tried, interrupted, left; over NCCL or gloo.

Over NCCL everything that concerns partners may wait in C++ for one that is gone. So its parts run
beside the main thread, which goes on reading the agent's words. A wait on the device is interrupted
by aborting the communicators, from the thread that learns first that it is in vain. A worker whose
group was aborted, and whose device still computes, is as good as before. NCCL's own answer,
non-blocking initialisation, is not used: torch took its default back because NCCL 2.26 hangs in it
now and then (pytorch/pytorch#154055).

A device that hangs in NCCL's initialisation holds up every other one of its group, and none of them
can tell which it is. So where a group has hung before (the option `apart`), each device is
connected by itself first, then each with every other one of its node: who hangs then is known.

By which way data goes between nodes is what NCCL says of itself, or the interface of gloo: NCCL has
no call for it, but logs it for each connection. It writes its log into memory, where it is read.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slurm_health.preflight.probes.context import Figure
from slurm_health.preflight.probes.meeting import POLL_S, Check, circles, connected
from slurm_health.preflight.probes.torch_device import TorchDevice, still_computes

# How long one that is told to leave waits for NCCL: a partner that is killed meanwhile closes its
# connections, which ends an initialisation.
LEAVE_S = 1.0
_OWN_LOG = "/proc/self/fd/"
# n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
# By way of a neighbour (PXN) the rank of that follows: NET/IB/3(2)/GDRDMA. A plugin's name may have
# a space: NET/AWS Libfabric/0/GDRDMA
_WAY = re.compile(r" via (NET/\w+(?: \w+)*)/\d+(?:\(\d+\))?(/GDRDMA)?")
# None before torch 2.6: a worker whose group broke is then replaced.
_abort: Callable[[Any], None] | None = getattr(distributed_c10d, "_abort_process_group", None)
_BINDS_DEVICE = "device_id" in inspect.signature(dist.init_process_group).parameters  # torch 2.3
# Its name from torch 2.13 on, and before.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def serve_store() -> tuple[object, int]:
    """Serve the rendezvous of every group that this worker's node leads; return its port too."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return store, int(store.port)


class TorchGroup:
    """As `context.Group` says; of one round, which `command` describes as the agent sends it."""

    def __init__(
        self, device: TorchDevice, command: Mapping[str, Any], local_rank: int, check: Check
    ) -> None:
        self.connecting: list[int] = []
        self.handle: Any = None  # the default process group, or that of the rail
        self._device = device
        self._is_nccl = device.on_cuda
        self._options = command["options"]
        self._local_size = int(command["local_size"])
        self._timeout = timedelta(seconds=float(command["timeout_s"]))
        self._local_rank = local_rank
        self._check = check
        self._lock = threading.Lock()
        self._beside: _Beside | None = None
        self._formed = False
        self._store: Any = None
        self._place: Mapping[str, Any] = {}
        self._meetings = 0

    def join(self, place: Mapping[str, Any], scope: str) -> None:
        """Come together with all members of the group of a scope, and connect.

        Raises:
            Unreachable: the place where they meet does not answer.
            RuntimeError: it failed, as where a partner is gone.
        """
        address, port = str(place["address"]), int(place["port"])
        rank, world_size = int(place["rank"]), int(place["world_size"])
        connected(address, port, self._check).close()
        self._store = dist.TCPStore(
            address, port, None, False, timeout=self._timeout, wait_for_workers=False
        )
        self._place, self._meetings = place, 0
        self.meet()
        if self._is_nccl:
            if "apart" in self._options:
                self._connect_apart(rank - self._local_rank, scope)
            self.connecting = list(range(world_size))
        self._form("", rank, world_size)
        if scope != "rail":  # whose adapter may fail without holding up other rails
            self._exchange_first()
        self.connecting = []

    def join_rail(self) -> None:
        """Go on with the members of this worker's local rank alone.

        They form it by themselves, or with NCCL all ranks split theirs off together.

        Raises:
            RuntimeError: it failed, as where a partner is gone.
        """
        world_size = int(self._place["world_size"])
        ranks = list(range(self._local_rank, world_size, self._local_size))
        self.connecting = list(range(world_size)) if self._is_nccl else []

        def form() -> None:
            self.handle = dist.new_group(
                ranks, timeout=self._timeout, use_local_synchronization=True
            )

        self._run(form)
        self._exchange_first()
        self.connecting = []

    def join_all(self) -> None:
        """Go on with all members, after a rail."""
        self.handle = None
        self._exchange_first()

    def meet(self) -> None:
        """Return once every member of the whole group has called this as often."""
        self._check()
        if self._store is None:
            return
        self._meetings += 1
        store = self._part("")
        store.set(f"here/{self._meetings}/{self._place['rank']}", "1")
        ranks = range(int(self._place["world_size"]))
        everyone = [f"here/{self._meetings}/{rank}" for rank in ranks]
        while not store.check(everyone):
            self._check()
            time.sleep(POLL_S)

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill the parts of all ranks, one after another in an array."""
        if self._is_nccl:
            # Into one tensor: a list is gathered into a buffer first, whose copy would be timed.
            _gather_into(whole, mine, group=self.handle)
        else:
            # Gloo has long known only this.
            ranks = dist.get_world_size(self.handle)
            dist.all_gather(list(whole.chunk(ranks)), mine, group=self.handle)

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, the same on all of them."""
        most = torch.tensor([value], device=self._device.raw)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.handle)
        return float(most.item())

    def figures(self) -> dict[str, Figure]:
        """Return by which ways data has gone so far, where that is known."""
        ways = ways_used(os.environ, on_cuda=self._is_nccl)
        return {"transport": ways} if ways else {}

    def leave(self) -> None:
        """Destroy the process group, if there is one, once all its members have come to the same.

        NCCL may wait for them in leaving, where nothing interrupts it; this meeting can be aborted.
        """
        if self._is_nccl and self._store is not None:
            self.meet()
        self._destroy()

    def _destroy(self) -> None:
        self._store, self.handle, self._formed = None, None, False
        if dist.is_initialized():
            dist.destroy_process_group()

    def leave_broken(self) -> bool:
        """Leave a group of which a member may be missing; tell whether this worker is still good.

        Gloo's is left as any other. Over NCCL a worker is not good where that does not let go of
        it within `LEAVE_S`, or its device no longer computes. The first is so where a partner is
        gone before it has connected to the first rank: that waits in ncclCommInitRank, and there is
        no communicator yet that could be aborted.
        """
        if not self._is_nccl:
            return True
        self._store = None
        if self._beside is not None:
            self._beside.join(LEAVE_S)
            if self._beside.is_alive():
                return False
        if _abort is None and dist.is_initialized():
            return False
        # An initialisation that failed has counted its group, and its members would no longer
        # agree with others on the next one's name.
        distributed_c10d._world.group_count = 0

        def abort_and_compute() -> None:
            self._formed = True  # or about to be, when the abort came
            self.interrupt()
            self._formed = False
            still_computes(self._device.raw)

        leaving = _Beside(abort_and_compute, self._device.raw)
        leaving.join(LEAVE_S)
        return not leaving.is_alive() and leaving.error is None

    def interrupt(self) -> None:
        """End whatever the main thread waits for in the group: from another thread.

        What it waits for comes back without data, or with an error. The group is lost.
        """
        with self._lock:
            if self._formed and self._is_nccl and _abort is not None and dist.is_initialized():
                self._formed = False
                # By name: torch 2.6 aborts nothing where none is given.
                _abort(dist.group.WORLD)

    def _part(self, name: str) -> Any:
        """Return a store of its own for some of the members, who all call it by this name."""
        return dist.PrefixStore(f"{self._place['prefix']}/{name}", self._store)

    def _connect_apart(self, first_rank: int, scope: str) -> None:
        """Connect this device by itself, and with each of its node: one that hangs is known then.

        Over several nodes only by itself: their devices have been together within each node before.
        """
        turns = circles(self._local_rank, self._local_size)
        for turn, circle in enumerate(turns if scope == "node" else turns[:1]):
            if circle:
                self.connecting = circle
                name = f"apart/{turn}/{first_rank + circle[0]}"
                self._form(name, circle.index(self._local_rank), len(circle))
                self._exchange_first()
                self.connecting = []
            self.meet()
            store = self._store
            self._destroy()
            self._store = store

    def _form(self, name: str, rank: int, world_size: int) -> None:
        """Form the default process group, and connect to its members' NCCL at once."""
        arguments: dict[str, Any] = {}
        if self._is_nccl and _BINDS_DEVICE:
            arguments["device_id"] = self._device.raw

        def init() -> None:
            dist.init_process_group(
                self._device.backend,
                store=self._part(name),
                rank=rank,
                world_size=world_size,
                timeout=self._timeout,
                **arguments,
            )

        self._run(init)
        self._formed = True

    def _exchange_first(self) -> None:
        """Make sure that the group can exchange data at all.

        Most groups that fail do it here, where members in Python need not be killed.
        """
        total = torch.ones(1, device=self._device.raw)
        work: Any = None

        def begin() -> None:
            nonlocal work
            work = dist.all_reduce(total, group=self.handle, async_op=True)

        self._run(begin)  # connections are made inside of the call
        while not work.is_completed():
            self._check()
            time.sleep(POLL_S)
        self._check()
        # What counts is the data: NCCL's wait would not raise, its work refuses is_success() (since
        # torch 2.3), and that of an aborted group is completed and has no exception.
        members, answered = dist.get_world_size(self.handle), float(total.item())
        if answered != members:
            reason = exception_of(work) or f"{answered:g} of {members} ranks added up"
            raise RuntimeError(f"the group's first exchange failed: {reason}")

    def _run(self, work: Callable[[], None]) -> None:
        """Run what may wait for partners, and raise what it raises, or what the check does."""
        if not self._is_nccl:
            work()
            return
        self._beside = beside = _Beside(work, self._device.raw)
        while beside.is_alive():
            self._check()
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
        self._work = work
        self._place = device
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        torch.cuda.set_device(self._place)  # each thread has its own
        try:
            self._work()
        except Exception as err:  # it is raised again in the main thread
            self.error = err


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
    matches = _WAY.findall(Path(log).read_text(errors="replace"))
    ways = (way + (" with GPUDirect RDMA" if direct else "") for way, direct in matches)
    return " and ".join(sorted(set(ways)))
