# SPDX-License-Identifier: Apache-2.0
"""A torch with a fault, as a sitecustomize.py of a worker: at the border to what is not ours."""

# One value of every product is off by one.
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
    if dist.get_rank() == 0:
        parts[1][7] ^= 1 << 20

dist.all_gather = wrong
"""

# The second worker of a node comes to every group, says so in $ABSENT_MINDED, and does no more.
# The first hangs when it leaves the group, as NCCL does then.
ABSENT_MINDED = """
import os, pathlib, sys, time
import torch.distributed

def absent_minded(*arguments, **more):
    pathlib.Path(os.environ["ABSENT_MINDED"]).touch()
    time.sleep(1000)

if sys.orig_argv[2:3] == ["1"]:
    torch.distributed.all_reduce = absent_minded
else:
    torch.distributed.destroy_process_group = absent_minded
"""
