# SPDX-License-Identifier: Apache-2.0
"""How much memory of the device is in use, again and again: `watch DEVICES`.

On a CPU it is that of the processes whose numbers stand in the last line of standard input: other
work on the machine takes and returns memory all the time.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.on_device.events import Events
from slurm_health.preflight.probes import torch_device as devices_of

_INTERVAL_S = 0.02


def main() -> None:
    """Say it until standard input ends."""
    events = Events()
    device = devices_of.claim(0, expected=int(sys.argv[1]), environ=os.environ).raw
    pids: list[int] = []
    while True:
        events.say(at_s=time.time(), used_bytes=_used_bytes(device, pids))
        if select.select([0], [], [], _INTERVAL_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            pids = [int(word) for word in line.split()]


def _used_bytes(device: torch.device, pids: list[int]) -> int:
    if device.type == "cuda":
        free_bytes, total_bytes = devices_of.memory_bytes(device)
        return total_bytes - free_bytes
    return sum(_resident_bytes(pid) for pid in pids)


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
