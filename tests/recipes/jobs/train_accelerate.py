# SPDX-License-Identifier: Apache-2.0
"""A tiny training with Hugging Face accelerate."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch, target in loader:
    loss = torch.nn.functional.mse_loss(model(batch), target)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
accelerator.print(f"trained with {accelerator.num_processes} processes, loss {loss.item():.3f}")
accelerator.end_training()
