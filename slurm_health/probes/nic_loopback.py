# SPDX-License-Identifier: Apache-2.0
"""How fast a node exchanges data with itself through each of its network adapters. Scope: solo.

With NCCL two processes of this node speak through one adapter, with every shorter way switched
off, so that a bad adapter or its slot in the node shows without a partner. NCCL reads its settings
once per process, so each adapter gets processes of its own. With gloo, on CPUs, the two speak over
the address of the node's interface: the kernel keeps that traffic inside the node, so that the
network stack is measured, and not the wire.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_health.probes import allgather
from slurm_health.probes.context import NotMeasured, ProbeContext, Sample

# Loading torch from a cold network filesystem comes on top of measuring.
DEADLINE_S = 120.0
POLL_S = 0.02
_WORKER = Path(__file__).with_name("worker.py")
_INFINIBAND = Path("/sys/class/infiniband")


def measure(context: ProbeContext) -> list[Sample]:
    """Measure each adapter in turn, on the first worker of the node.

    Returns:
        One sample for each adapter, whose name is the quantity.

    Raises:
        NotMeasured: the environment names an adapter that is not there, or nothing came back.
    """
    if context.local_rank != 0:
        return []
    return [_through(adapter, context) for adapter in _adapters(context, os.environ)]


def _adapters(context: ProbeContext, environ: Mapping[str, str]) -> list[str]:
    if not context.on_cuda:
        interface = environ.get("GLOO_SOCKET_IFNAME", "")
        return [interface] if interface else []
    present = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    return chosen_adapters(environ.get("NCCL_IB_HCA", ""), present)


def chosen_adapters(wanted: str, present: list[str]) -> list[str]:
    """Return the adapters that NCCL would use, by its variable NCCL_IB_HCA.

    The variable lists beginnings of names; with `=` in front, whole names; with `^`, those not to
    use. A port may follow a name, behind a colon.

    Raises:
        NotMeasured: it names an adapter that this node does not have.
    """
    unwanted, rest = wanted.startswith("^"), wanted.lstrip("^")
    whole, names = rest.startswith("="), rest.lstrip("=")
    listed = [name.partition(":")[0] for name in names.split(",") if name]

    def fits(adapter: str, name: str) -> bool:
        return adapter == name if whole else adapter.startswith(name)

    missing = [name for name in listed if not any(fits(adapter, name) for adapter in present)]
    if missing and not unwanted:
        raise NotMeasured(
            f"NCCL_IB_HCA names {', '.join(missing)}, but this node has"
            f" {', '.join(present) or 'no InfiniBand or RoCE adapter'}"
        )
    if not listed:
        return present
    return [a for a in present if any(fits(a, name) for name in listed) is not unwanted]


def _through(adapter: str, context: ProbeContext) -> Sample:
    """Run the two processes of one adapter to their end."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, str(_WORKER), "loopback", str(rank), str(store.port)],
            env=_environ(adapter, context, rank),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        _await(processes, adapter)
        outputs = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs):  # noqa: B905 - older Pythons run this
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise NotMeasured(f"{adapter}: {lines[-1] if lines else 'its processes died'}")
    found = json.loads(outputs[0][0])
    return Sample(
        quantity=adapter, iteration_ms=found["iteration_ms"], total_bytes=found["total_bytes"]
    )


def _environ(adapter: str, context: ProbeContext, rank: int) -> dict[str, str]:
    environ = dict(os.environ)
    if not context.on_cuda:
        return environ
    environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_HCA": f"={adapter}"}
    if context.local_size == 1:
        # NCCL refuses two ranks on one device, unless they seem to be on different hosts.
        environ["NCCL_HOSTID"] = f"slurm-health-{rank}"
    return environ


def _await(processes: list[subprocess.Popen[bytes]], adapter: str) -> None:
    """Wait until both have ended, or one has failed: the other would wait for it.

    Raises:
        NotMeasured: they take too long.
    """
    give_up = time.monotonic() + DEADLINE_S
    while any(process.poll() is None for process in processes):
        if any(process.poll() not in (None, 0) for process in processes):
            for process in processes:
                process.terminate()
            return
        if time.monotonic() > give_up:
            raise NotMeasured(f"{adapter}: no result within {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)


def exchange(arguments: list[str]) -> None:
    """Be one of the two processes: `RANK PORT`; the first prints what it measured."""
    rank, port = map(int, arguments)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if on_cuda:
        device = torch.device("cuda", min(rank, torch.cuda.device_count() - 1))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=DEADLINE_S)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", store=store, rank=rank, world_size=2, timeout=timeout
    )
    context = ProbeContext(device=device, local_rank=rank, local_size=2, rank=rank, world_size=2)
    found = allgather.measure(context)[0]
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"iteration_ms": found.iteration_ms, "total_bytes": found.total_bytes}))
