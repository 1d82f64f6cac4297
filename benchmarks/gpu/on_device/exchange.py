# SPDX-License-Identifier: Apache-2.0
"""A probe of scope pair that exchanges data long enough for a fault to strike meanwhile.

After its first collective each worker leaves a file `NODE.PID` in the directory that the
variable EXCHANGE_DIRECTORY names; the one of the node that EXCHANGE_RAISES names raises.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from slurm_health.preflight.probes.context import ProbeContext, Sample

# So long together, however fast one is: every rank makes as many.
_EXCHANGES, _EACH_S = 40, 0.05
_BYTES_PER_RANK = 1 << 20


def measure(context: ProbeContext) -> list[Sample]:
    """Exchange, as often on every rank."""
    mine = torch.ones(_BYTES_PER_RANK // 4, device=context.device)
    whole = [torch.empty_like(mine) for _ in range(context.world_size)]
    for _ in range(2):  # the first connects; in the second every member has come so far
        _exchange_ms(context, whole, mine)
    node = _node()
    (Path(os.environ["EXCHANGE_DIRECTORY"]) / f"{node}.{os.getpid()}").touch()
    if node == os.environ.get("EXCHANGE_RAISES"):
        raise RuntimeError("raised after a collective, as it was told to")
    times_ms = []
    for _ in range(_EXCHANGES):
        times_ms.append(_exchange_ms(context, whole, mine))
        time.sleep(max(0.0, _EACH_S - times_ms[-1] / 1e3))
    total_bytes = _BYTES_PER_RANK * context.world_size
    return [Sample(iteration_ms=times_ms[:20], shared=True, total_bytes=total_bytes)]


def _exchange_ms(context: ProbeContext, whole: list[torch.Tensor], mine: torch.Tensor) -> float:
    start = time.perf_counter()
    dist.all_gather(whole, mine)
    context.synchronize()
    return (time.perf_counter() - start) * 1e3


def _node() -> str:
    """Return the node this is on, from the agent's command line."""
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith("--node="))
