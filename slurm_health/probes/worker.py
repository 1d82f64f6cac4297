# SPDX-License-Identifier: Apache-2.0
"""One process per device: loads torch once, then runs one round after another.

The agent starts it with the job's own interpreter, sends commands as JSON lines on its standard
input and reads events as JSON lines from its standard output:

    command  {"op": "round", "round": 0, "rank": 0, "world_size": 2, "address": "10.0.0.1",
              "port": 4711, "prefix": "3f2a/0/n1", "timeout_s": 60.0}
             {"op": "abort", "round": 0}
             end of file: leave
    event    {"event": "ready", "store_port": 4711, "torch": "2.4.1", "backend": "gloo", ...}
             {"event": "sample", "round": 0, "probe": "matmul", "iteration_ms": [...], ...}
             {"event": "done", "round": 0, "outcome": "measured", "detail": "", "own_fault": false}

An aborted worker that is still in Python answers "done" with outcome "timed_out"; one that is
stuck inside a collective cannot, and the agent kills it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_STARTED = time.perf_counter()
POLL_S = 0.005


class Aborted(Exception):
    """The agent said to stop waiting."""


class Channel:
    """Commands from the agent and events to it."""

    def __init__(self) -> None:
        # Libraries print to standard output (NCCL_DEBUG does): keep a private copy for events and
        # send everything else where errors go.
        self._events = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.rounds: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._aborted = -1
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, event: str, **fields: object) -> None:
        """Send one event."""
        self._events.write(json.dumps({"event": event, **fields}) + "\n")

    def raise_if_aborted(self, round_index: int) -> None:
        """Raise Aborted once the agent has aborted this round.

        Raises:
            Aborted: it has.
        """
        if self._aborted >= round_index:
            raise Aborted

    def _listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["op"] == "abort":
                self._aborted = max(self._aborted, int(command["round"]))
            else:
                self.rounds.put(command)
        # The agent is gone. The main thread may be stuck in a collective, so leave from here.
        os._exit(0)


def main() -> None:
    """Serve rounds until the agent leaves."""
    channel = Channel()
    local_rank = int(sys.argv[1])
    threads = int(sys.argv[2])
    import torch
    import torch.distributed as dist

    from slurm_health.probes import collectives, matmul

    torch.set_num_threads(threads)
    device = _device(local_rank)
    # The first worker of a node serves the rendezvous of every group its node leads.
    store = (
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        if local_rank == 0
        else None
    )
    channel.send(
        "ready",
        store_port=store.port if store else 0,
        torch=str(torch.__version__),
        backend=_backend(device),
        device=_device_name(device),
        collective_library=_collective_library(device),
        start_ms=round((time.perf_counter() - _STARTED) * 1e3, 1),
    )
    probes = {"matmul": matmul.measure, "allgather": collectives.measure_allgather}
    while True:
        command = channel.rounds.get()
        assert command is not None
        _serve(channel, command, device, probes)


def _serve(channel: Channel, command: dict[str, Any], device: Any, probes: dict[str, Any]) -> None:
    """Run one round and say how it ended, whatever happened."""
    round_index = int(command["round"])
    # Own until the first moment at which a partner can be to blame.
    own_fault = True
    try:
        sample = probes["matmul"](device)
        channel.send(
            "sample",
            round=round_index,
            probe="matmul",
            iteration_ms=sample.iteration_ms,
            flop=sample.flop,
        )
        if int(command["world_size"]) > 1:
            own_fault = False
            _measure_group(channel, command, device, probes)
    except Aborted:
        channel.send(
            "done", round=round_index, outcome="timed_out", detail="told to stop", own_fault=False
        )
    except Exception as err:
        detail = f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
        channel.send(
            "done", round=round_index, outcome="failed", detail=detail[:300], own_fault=own_fault
        )
    else:
        channel.send("done", round=round_index, outcome="measured", detail="", own_fault=False)


def _measure_group(
    channel: Channel, command: dict[str, Any], device: Any, probes: dict[str, Any]
) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=float(command["timeout_s"]))
    store = _meet(channel, command, timeout)
    dist.init_process_group(
        _backend(device),
        store=store,
        rank=int(command["rank"]),
        world_size=int(command["world_size"]),
        timeout=timeout,
    )
    try:
        sample = probes["allgather"](device)
        channel.send(
            "sample",
            round=int(command["round"]),
            probe="allgather",
            iteration_ms=sample.iteration_ms,
            total_bytes=sample.total_bytes,
            world_size=sample.world_size,
        )
    finally:
        dist.destroy_process_group()


def _meet(channel: Channel, command: dict[str, Any], timeout: timedelta) -> Any:
    """Return the group's store once every member is known to be there.

    Waits in Python, so that an abort is heard: torch's own rendezvous cannot be interrupted.
    """
    import torch.distributed as dist

    round_index = int(command["round"])
    address, port = str(command["address"]), int(command["port"])
    _wait_for_port(channel, round_index, address, port)
    store = dist.PrefixStore(
        str(command["prefix"]),
        dist.TCPStore(address, port, None, False, timeout=timeout, wait_for_workers=False),
    )
    store.set(f"here/{command['rank']}", "1")
    everyone = [f"here/{rank}" for rank in range(int(command["world_size"]))]
    while not store.check(everyone):
        channel.raise_if_aborted(round_index)
        time.sleep(POLL_S)
    return store


def _wait_for_port(channel: Channel, round_index: int, address: str, port: int) -> None:
    while True:
        channel.raise_if_aborted(round_index)
        try:
            socket.create_connection((address, port), timeout=1.0).close()
        except OSError:
            time.sleep(POLL_S)
        else:
            return


def _device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"device {local_rank} was expected, torch sees {torch.cuda.device_count()}"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _backend(device: Any) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _device_name(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'uuid', '')}".strip()


def _collective_library(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return "gloo"
    return "nccl " + ".".join(str(part) for part in torch.cuda.nccl.version())


def _make_package_importable() -> None:
    """Make `slurm_health` importable from where this file lies.

    Not through sys.path: the packages beside this one belong to another interpreter and must not
    shadow the job's own.
    """
    if "slurm_health" in sys.modules:
        return
    package = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "slurm_health", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slurm_health"] = module
    spec.loader.exec_module(module)


def _arguments_are_valid(arguments: list[str]) -> bool:
    return len(arguments) == 2 and all(argument.isdigit() for argument in arguments)


if __name__ == "__main__":
    if not _arguments_are_valid(sys.argv[1:]):
        raise SystemExit("usage: worker.py LOCAL_RANK THREADS (started by the slurm-health agent)")
    # A worker is run by its path; its own directory must not be searched for modules.
    sys.path.pop(0)
    _make_package_importable()
    main()
