# SPDX-License-Identifier: Apache-2.0
"""The faults of played GPUs on the command line of the lab."""

import argparse
from collections.abc import Callable

from .lab import Lab

Apply = Callable[[Lab, argparse.Namespace], None]
Add = Callable[[str, str, Apply], argparse.ArgumentParser]


def add_faults(add: Add) -> None:
    """Add a command for each fault of a GPU."""

    def on_device(kind: str, help_: str, apply: Apply) -> argparse.ArgumentParser:
        parser = add(kind, help_, apply)
        parser.add_argument(
            "device", metavar="GPU", nargs="?", type=int, default=0, help="default: 0, the first"
        )
        return parser

    def option(parser: argparse.ArgumentParser, name: str, default: float, help_: str) -> None:
        kind = type(default)
        parser.add_argument(name, type=kind, default=default, help=f"{help_} (default: {default})")

    on_device(
        "gpu-dead",
        "a GPU cannot be opened any more",
        lambda lab, o: lab.fault.gpu_dead(o.node, o.device),
    )
    on_device(
        "gpu-vanish",
        "a GPU falls off the bus",
        lambda lab, o: lab.fault.gpu_vanish(o.node, o.device),
    )
    slow = on_device(
        "gpu-slow",
        "a GPU computes more slowly",
        lambda lab, o: lab.fault.gpu_slow(o.node, o.device, o.share),
    )
    hot = on_device(
        "gpu-hot",
        "a GPU gets too hot, and is slowed down",
        lambda lab, o: lab.fault.gpu_hot(o.node, o.device, o.share, o.after_s),
    )
    for parser in (slow, hot):
        option(parser, "--share", 0.5, "of its speed")
    option(hot, "--after-s", 0.5, "seconds of work")
    lying = on_device(
        "gpu-lying",
        "a GPU computes a wrong bit",
        lambda lab, o: lab.fault.gpu_lying(o.node, o.device, o.products),
    )
    option(lying, "--products", 1, "one in so many is wrong")
    ecc = on_device(
        "gpu-ecc",
        "a GPU loses memory to an uncorrectable error",
        lambda lab, o: lab.fault.gpu_ecc(o.node, o.device, o.after),
    )
    hang = on_device(
        "gpu-hang",
        "an operation of a GPU never ends",
        lambda lab, o: lab.fault.gpu_hang(o.node, o.device, o.after),
    )
    for parser in (ecc, hang):
        option(parser, "--after", 0, "operations of each process")
    on_device(
        "gpu-divided",
        "a GPU is divided into instances (MIG)",
        lambda lab, o: lab.fault.gpu_divided(o.node, o.device),
    )
    on_device(
        "nccl-hang",
        "NCCL hangs in its initialisation on a GPU",
        lambda lab, o: lab.fault.nccl_hang(o.node, o.device),
    )
    occupied = on_device(
        "gpu-occupied",
        "a process of bob's holds a GPU's memory",
        lambda lab, o: lab.fault.gpu_occupied(o.node, o.device, o.share),
    )
    option(occupied, "--share", 0.97, "of its memory")
    nvlink = on_device(
        "nvlink-down",
        "NVLinks of a GPU are down",
        lambda lab, o: lab.fault.nvlink_down(o.node, o.device, o.links, o.gb_per_s),
    )
    option(nvlink, "--links", 1, "how many of 18; with all of them NCCL is slow")
    option(nvlink, "--gb-per-s", 0.1, "how slow")
    rail = on_device(
        "slow-rail",
        "a GPU's adapter is slow",
        lambda lab, o: lab.fault.slow_rail(o.node, o.device, o.gb_per_s),
    )
    option(rail, "--gb-per-s", 0.02, "both directions")
    on_device(
        "dead-rail",
        "a GPU's adapter connects to no other",
        lambda lab, o: lab.fault.dead_rail(o.node, o.device),
    )
