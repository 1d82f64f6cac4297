# SPDX-License-Identifier: Apache-2.0
"""A collective to which rank 1 does not come; argument: what the others do about it."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=timedelta(seconds=float(os.environ.get("LIMIT_S", "4"))))
x = torch.ones(1024, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 1:
    if sys.argv[1] != "gone":
        sys.stdin.read()  # until the test has seen the others end
    os._exit(3)
work = dist.all_reduce(x, async_op=True)
print("pending", not work.is_completed(), flush=True)
if sys.argv[1] == "abort":
    begun_s = time.monotonic()
    dist.distributed_c10d._abort_process_group(dist.group.WORLD)
    torch.cuda.synchronize()
    print("aborted", work.is_completed(), flush=True)
    print(f"after {time.monotonic() - begun_s:.3f} s", file=sys.stderr)
    os._exit(0)
work.wait()
(x + 1).sum().item()
