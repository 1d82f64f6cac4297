# SPDX-License-Identifier: Apache-2.0
"""How fast a node exchanges data with itself through each of its network adapters. Scope: solo.

With NCCL two processes of this node speak through one adapter, with every shorter way switched
off, so that a bad adapter or its slot in the node shows without a partner. NCCL reads its settings
once per process, so each adapter gets processes of its own, on the devices that are nearest to it.
Adapters whose devices differ are measured at the same time: a device that two exchanges share
would give each its turn, and time would be what is measured. With gloo, on CPUs, the two speak
over the address of the node's interface: the kernel keeps that traffic inside the node, so that
the network stack is measured, and not the wire.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from slurm_health.preflight.probes import adapters, allgather
from slurm_health.preflight.probes.context import (
    NodeFault,
    NotMeasured,
    ProbeContext,
    Sample,
    WrongPayload,
)

# For one wave of adapters. The files of torch are in memory: this worker has loaded them.
DEADLINE_S = 60.0
POLL_S = 0.02
_WORKER = Path(__file__).with_name("worker.py")
_PCI_PARTS = ("domain", "bus", "device")
# What CUDA says to the second process on a device that lets only one in.
_EXCLUSIVE = "busy or unavailable"


@dataclass(frozen=True)
class Lane:
    """One adapter, and the devices whose data goes through it."""

    adapter: str
    devices: tuple[int, int] = (0, 0)


def measure(context: ProbeContext) -> list[Sample]:
    """Measure each adapter, on the first worker of the node.

    Returns:
        One sample for each adapter, whose name is the quantity. One without times where devices
        serve one process only, which is a worker's already; its figures say so.

    Raises:
        NodeFault: data arrived changed.
        NotMeasured: the environment names an adapter that is not there, or nothing came back.
    """
    if context.local_rank != 0:
        return []
    return [
        sample
        for wave in waves(_lanes(context, os.environ))
        for sample in _measured(wave, on_cuda=context.on_cuda)
    ]


def _lanes(context: ProbeContext, environ: Mapping[str, str]) -> list[Lane]:
    if not context.on_cuda:
        interface = environ.get("GLOO_SOCKET_IFNAME", "")
        return [Lane(interface)] if interface else []
    return lanes(adapters.used(environ), places(context.local_size))


def places(devices: int) -> list[adapters.Place]:
    """Return where the devices of this node are plugged in."""
    return [_place(number) for number in range(devices)]


def _place(device: int) -> adapters.Place:
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", -1) for part in _PCI_PARTS)
    if bus < 0:
        return adapters.Place()  # an older torch does not tell
    return adapters.place_of_pci(f"{domain:04x}:{bus:02x}:{slot:02x}.0")


def lanes(found: Sequence[adapters.Adapter], devices: Sequence[adapters.Place]) -> list[Lane]:
    """Give each adapter the two devices that are nearest to it, or the only one twice."""
    near = [adapters.nearest_first(each.place, devices) for each in found]
    return [
        Lane(each.name, (order[0], order[min(1, len(order) - 1)]))
        for each, order in zip(found, near)  # noqa: B905 - older Pythons run this
    ]


def waves(wanted: Iterable[Lane]) -> list[list[Lane]]:
    """Put together what can be measured at the same time: no device is in one wave twice."""
    found: list[list[Lane]] = []
    for lane in wanted:
        for wave in found:
            if not {*lane.devices} & {device for each in wave for device in each.devices}:
                wave.append(lane)
                break
        else:
            found.append([lane])
    return found


def _measured(wave: Sequence[Lane], *, on_cuda: bool) -> list[Sample]:
    """Run the exchanges of one wave to their end.

    Raises:
        NodeFault: data arrived changed.
        NotMeasured: an exchange failed, or takes too long.
    """
    give_up = time.monotonic() + DEADLINE_S
    with contextlib.ExitStack() as ends:
        running = [ends.enter_context(_Exchange(lane, on_cuda=on_cuda)) for lane in wave]
        while any(each.runs() for each in running) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return [each.sample() for each in running]


class _Exchange:
    """The two processes of one adapter. What they say is kept in memory, however much it is."""

    def __init__(self, lane: Lane, *, on_cuda: bool) -> None:
        self._lane = lane
        self._on_cuda = on_cuda
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Exchange:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._answers = [_in_memory("answer") for _ in (0, 1)]
        self._errors = [_in_memory("errors") for _ in (0, 1)]
        environ = environ_of(self._lane, os.environ) if self._on_cuda else dict(os.environ)
        for rank, device in enumerate(self._lane.devices):
            if self._on_cuda and len(set(self._lane.devices)) == 1:
                # NCCL refuses two ranks on one device, unless they seem to be on two hosts.
                environ["NCCL_HOSTID"] = f"slurm-health-{rank}"
            numbers = (rank, self._store.port, device)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(_WORKER), "loopback", *map(str, numbers)],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=self._answers[rank],
                    stderr=self._errors[rank],
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for file in (*self._answers, *self._errors):
            file.close()

    def runs(self) -> bool:
        """Tell whether it goes on: not if one has failed, for whom the other would wait."""
        codes = [process.poll() for process in self._processes]
        return None in codes and not any(codes)

    def sample(self) -> Sample:
        """Return what was measured.

        Raises:
            NodeFault: data arrived changed.
            NotMeasured: an exchange failed, or takes too long.
        """
        adapter = self._lane.adapter
        failed = [rank for rank, process in enumerate(self._processes) if process.poll()]
        if failed:
            return failure(self._lane, _text(self._errors[failed[0]]))
        said = [_text(file) for file in self._answers]
        if not all(said):
            raise NotMeasured(f"{adapter}: no result within {DEADLINE_S:.0f} s")
        answers = [json.loads(each.splitlines()[-1]) for each in said]
        for wrong in (each["wrong"] for each in answers if "wrong" in each):
            raise NodeFault(f"{adapter}: {wrong}")
        return Sample(quantity=adapter, **answers[0])


def _in_memory(name: str) -> BinaryIO:
    return os.fdopen(os.memfd_create(name), "w+b")


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace")).strip()


def environ_of(lane: Lane, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which NCCL has no way but this adapter."""
    return {
        **environ,
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": f"={lane.adapter}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
    }


def failure(lane: Lane, errors: str) -> Sample:
    """Return what stands for an exchange that could not be had, by what its process said.

    Raises:
        NotMeasured: it failed for another reason than that the device serves one process only.
    """
    if _EXCLUSIVE in errors:
        why = "the devices are in exclusive-process mode, and each has its worker already"
        return Sample(quantity=lane.adapter, figures={"left_out": why})
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = [line for line in lines if "NCCL INFO" not in line] or ["its processes died"]
    raise NotMeasured(f"{lane.adapter}: {said[-1]}")


def exchange(arguments: list[str]) -> None:
    """Be one of the two processes: `RANK PORT DEVICE`; it answers with what it measured."""
    # NCCL_DEBUG prints to standard output: only the answer may go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank, port, number = map(int, arguments)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", number) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=2, timeout=timeout
    )
    context = ProbeContext(device=device, local_rank=rank, local_size=2, rank=rank, world_size=2)
    answer: dict[str, object]
    try:
        found = allgather.measure(context)[0]
        answer = {
            "iteration_ms": found.iteration_ms,
            "taken_ms": found.taken_ms,
            "total_bytes": found.total_bytes,
        }
    except WrongPayload as err:
        answer = {"wrong": str(err)}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answer), file=answers, flush=True)
