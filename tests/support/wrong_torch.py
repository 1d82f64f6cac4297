# SPDX-License-Identifier: Apache-2.0
"""A device that computes wrong results, as far as one can be had: at the border to torch."""

from __future__ import annotations

# A sitecustomize.py with which one value of every product is off by one.
SITECUSTOMIZE = """
import torch

right = torch.mm

def wrong(*arguments, **more):
    result = right(*arguments, **more)
    result[-1, -1] += 1
    return result

torch.mm = wrong
"""

# A sitecustomize.py with which one bit of what the second rank sends changes before the first has
# it.
CHANGED_ON_THE_WAY = """
import torch
import torch.distributed as dist

right = dist.all_gather

def wrong(parts, mine, *arguments, **more):
    right(parts, mine, *arguments, **more)
    if dist.get_rank() == 0 and mine.dtype is torch.float32:
        parts[1].view(torch.int32)[7] ^= 1 << 20

dist.all_gather = wrong
"""
