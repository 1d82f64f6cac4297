# SPDX-License-Identifier: Apache-2.0
"""Memory that is held until the process is killed: `hold BYTES idle|busy DEVICES`."""

from __future__ import annotations

import os
import sys
import time

import torch

from benchmarks.gpu.on_device.events import Events
from slurm_health.preflight.probes import torch_device as devices_of

_SIZE, _SMALL_SIZE = 8192, 256
_FAST_GFLOP_PER_S = 2000.0  # a product of the large size takes half a second there
_QUEUED = 50  # products that the device has been given and has not computed


def main() -> None:
    """Hold it, say so, and wait or multiply for ever."""
    held_bytes, what, devices = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    events = Events()
    claimed = devices_of.claim(0, expected=devices, environ=os.environ)
    device, fast = claimed.raw, claimed.on_cuda and claimed.speeds()[0] >= _FAST_GFLOP_PER_S
    size = _SIZE if fast else _SMALL_SIZE
    square = torch.ones(size, size, device=device)
    out = torch.mm(square, square)
    held = torch.ones(held_bytes, dtype=torch.uint8, device=device)
    events.say(held_bytes=held.numel(), sum=float(out[0, 0]))
    while what == "busy":
        for _ in range(_QUEUED):
            torch.mm(square, square, out=out)
        float(out[0, 0])
    time.sleep(3600)


if __name__ == "__main__":
    main()
