# SPDX-License-Identifier: Apache-2.0
"""What NVML tells of a node's GPUs, by the product's own readers, as one line of JSON.

    python -m benchmarks.played_training.gpus [hangs]

It runs under the interpreter with played GPUs, beside a training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from slurm_health.preflight.agent import gpu_monitor
from slurm_health.records.gpu_load import DeviceSample, decode
from slurm_health.system.nvml import Gpus, read_gpus
from slurm_health.training.monitor.closer_look import GpuActivity, activity

_THERE = Path("/dev/null")  # the file by which a driver is known


class GpusNow(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of a node at one moment; `hangs`: ranks waited for each other then.

    `gpus` is what the health check reads, `samples` what a burn is watched by, and `activity` what
    the monitor asks while a training stands still.
    """

    node: str = ""
    hangs: bool = False
    gpus: Gpus
    samples: tuple[DeviceSample, ...]
    activity: GpuActivity


def main() -> None:
    """Ask once, and tell."""
    # Without an input that stays open, the sampler ends after the first sample of each GPU.
    sampler = subprocess.run(
        gpu_monitor.command(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    told = map(decode, sampler.stdout.splitlines())
    now = GpusNow(
        node=os.environ["SLURMD_NODENAME"],
        hangs=sys.argv[1:] == ["hangs"],
        gpus=read_gpus(),
        samples=tuple(each for each in told if isinstance(each, DeviceSample)),
        activity=activity(driver=_THERE),
    )
    sys.stdout.buffer.write(msgspec.json.encode(now))


if __name__ == "__main__":
    main()
