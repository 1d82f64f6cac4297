# SPDX-License-Identifier: Apache-2.0
"""A collective that rank 1 calls otherwise than rank 0; argument: in what they differ."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=timedelta(seconds=4))
mine = torch.ones(1024, device="cuda")
dist.all_reduce(mine)
if sys.argv[1] == "operation" and rank == 1:
    dist.all_gather_into_tensor(torch.empty(2048, device="cuda"), mine)
elif sys.argv[1] == "size":
    dist.all_reduce(torch.ones(1024 if rank == 0 else 512, device="cuda"))
else:
    dist.all_reduce(mine)
torch.cuda.synchronize()
print("went on", flush=True)
sys.stdin.read()  # until the test has seen the other end
