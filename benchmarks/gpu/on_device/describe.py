# SPDX-License-Identifier: Apache-2.0
"""Says what the devices and versions are: `describe DEVICES`, 0 for CPUs alone."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks.gpu.on_device.events import Events
from slurm_health.preflight.probes import host
from slurm_health.preflight.probes import torch_device as devices_of


def main() -> None:
    """Describe them, or end with the reason why they cannot be used."""
    expected = int(sys.argv[1])
    device = devices_of.claim(0, expected=expected, environ=os.environ).raw
    packages = Path(torch.__file__).parents[1]
    Events().say(
        torch=str(torch.__version__),
        collective_library=devices_of.collective_library(device),
        runtime=str(torch.version.cuda or getattr(torch.version, "hip", None) or ""),
        model=torch.cuda.get_device_name(device)
        if expected
        else host.model(torch.get_num_threads()),
        devices=[_described(number) for number in range(expected)],
        python=platform.python_version(),
        directories=[str(path) for path in (packages / "torch", packages / "nvidia")],
    )


def _described(number: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(number)
    return {
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "total_bytes": properties.total_memory,
    }


if __name__ == "__main__":
    main()
