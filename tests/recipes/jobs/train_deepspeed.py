# SPDX-License-Identifier: Apache-2.0
"""A tiny training with DeepSpeed, over gloo."""

import deepspeed
import torch

# Otherwise it compiles an extension for CPUs first, which takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(4):
    inputs = torch.randn(8, 8)
    loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
if deepspeed.comm.get_rank() == 0:
    print(f"trained with {deepspeed.comm.get_world_size()} processes", flush=True)
