# SPDX-License-Identifier: Apache-2.0
"""A healthy job that pauses as those of its kind do: `healthy.py KIND SCALE HOURS`, by srun.

SCALE is that of all times: those of a real job, and the limits that they are measured against.
"""

from __future__ import annotations

import asyncio
import ctypes
import http.server
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import urllib.request
from datetime import timedelta
from typing import Any

KIND, SCALE, HOURS = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
if KIND not in {"service", "notebook", "idle", "data"}:  # which are many at once, and small
    import torch
    import torch.distributed as dist
UNTIL_S = time.monotonic() + 3600 * HOURS * SCALE
RANK, WORLD = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
PAUSE_S, STEP_S = 75 * SCALE, 2.5 * SCALE
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def work(for_s: float) -> None:
    """Use a quarter of a processor: the others of so many jobs need it, too."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        began_s = time.process_time()
        sum(range(10_000))
        time.sleep(3 * (time.process_time() - began_s))


def train(steps: int, step_s: float = STEP_S, *, counts: bool = True) -> None:
    """Train some steps with the other ranks."""
    weights = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weights], lr=0.01)
    for step in range(steps):
        time.sleep(step_s)
        weights.grad = torch.ones(64)
        dist.all_reduce(weights.grad)
        optimizer.step()
        if RANK == 0 and counts:
            print(f"step {step} loss {float(weights.sum()):.3f}", flush=True)


class SlowStorage(io.BytesIO):
    """A file of a filesystem that takes little at a time."""

    def write(self, data: Any, /) -> int:
        """Take some time."""
        time.sleep(2 * SCALE)
        return len(memoryview(data))


def save_slowly() -> None:
    """Write a checkpoint."""
    until_s = time.monotonic() + PAUSE_S
    while time.monotonic() < until_s:
        torch.save({"weights": torch.ones(256)}, SlowStorage())


def be_debugged() -> None:
    """Have a debugger hold this process for a while."""
    libc = ctypes.CDLL(None, use_errno=True)
    traced = os.getpid()
    if os.fork() == 0:
        libc.ptrace(PTRACE_ATTACH, traced, 0, 0)
        time.sleep(PAUSE_S)
        libc.ptrace(PTRACE_DETACH, traced, 0, 0)
        os._exit(0)


def be_stopped() -> None:
    """Be stopped, and continued after a while: no healthy job."""
    stopped = os.getpid()
    if os.fork() == 0:
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(2 * PAUSE_S)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)


def serve() -> None:
    """Answer requests, and count them; then none comes for a while."""

    class Handler(http.server.BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            Handler.count += 1
            print(f"request {Handler.count}", flush=True)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while time.monotonic() < UNTIL_S:
        for _ in range(40):
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").close()
            time.sleep(SCALE)
        time.sleep(10 * PAUSE_S)


def prepare_data() -> None:
    """Work in a pool of processes; ranks end one after another."""
    with multiprocessing.Pool(1) as pool:
        while time.monotonic() < UNTIL_S - RANK * 10 * PAUSE_S:
            pool.map(work, [PAUSE_S / 3] * (1 + 2 * RANK))


def pause() -> None:
    """Do what this kind does between steps."""
    if KIND == "compile":
        if RANK == 0:
            child = multiprocessing.get_context("fork").Process(target=work, args=(PAUSE_S,))
            child.start()
            child.join()
    elif KIND == "checkpoint" and RANK == 0:
        save_slowly()
    elif KIND == "evaluation" and RANK == 0:
        work(PAUSE_S)
    elif KIND == "debugger" and RANK == 0:
        be_debugged()
    elif KIND == "control" and RANK == 0:
        be_stopped()


def main() -> None:
    """Be a job of this kind."""
    if KIND == "service":
        serve()
    elif KIND == "notebook":
        asyncio.run(asyncio.sleep(UNTIL_S - time.monotonic()))
    elif KIND == "idle":
        time.sleep(UNTIL_S - time.monotonic())
    elif KIND == "data":
        prepare_data()
    else:
        os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(WORLD)}
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        left = torch.ones(1)
        while left.item():
            if KIND == "accumulating":
                train(6, step_s=PAUSE_S / 3, counts=False)
            else:
                train(2 if KIND == "compile" else 60)
                pause()
                dist.barrier()
                train(20)
            left[0] = time.monotonic() < UNTIL_S
            dist.broadcast(left, 0)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
