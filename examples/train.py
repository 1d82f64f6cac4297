# SPDX-License-Identifier: Apache-2.0
"""A small data-parallel training: one process per node, on its first GPU if it has one.

Started by `srun` once per node; prints the loss of each epoch from rank 0.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for a few epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()

    rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    layers = torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(arguments.epochs):
        for _ in range(20):
            inputs = torch.randn(128, 64, device=device)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}  {world_size} nodes  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
