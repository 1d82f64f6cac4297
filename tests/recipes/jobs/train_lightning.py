# SPDX-License-Identifier: Apache-2.0
"""A tiny training with Lightning, on as many processes as Slurm started."""

import os

import torch
from lightning import LightningModule, Trainer


class Tiny(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Learn to add."""
        return torch.nn.functional.mse_loss(self.layer(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain one."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
    num_nodes=int(os.environ["SLURM_NNODES"]),
    strategy="ddp",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8))
if trainer.is_global_zero:
    print(f"trained with {trainer.world_size} processes", flush=True)
