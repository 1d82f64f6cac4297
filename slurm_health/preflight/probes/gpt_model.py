# SPDX-License-Identifier: Apache-2.0
"""The GPT that the probes `gpt` and `gpt_fit` train, and one training step of it.

`slurm_health.preflight.session.gpt_sizing` knows how large it is; a test holds the two together.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from slurm_health.preflight.probes import device
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext

SEED = 20240
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Shape:
    """The model, and how many sequences one step of one device has."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int


def shape_of(options: Mapping[str, int | float | str]) -> Shape:
    """Return the shape that the round's options ask for.

    Raises:
        NotMeasured: they ask for none, or say why there can be none.
    """
    if "gpt_refused" in options:
        raise NotMeasured(str(options["gpt_refused"]))
    names = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
    missing = [f"gpt_{name}" for name in names if f"gpt_{name}" not in options]
    if missing:
        raise NotMeasured(f"the round does not say which GPT to train: no {', '.join(missing)}")
    return Shape(*(int(options[f"gpt_{name}"]) for name in names))


class _Block(nn.Module):
    """Attention and MLP, each after a layer norm and around a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.before_attention = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attended = nn.Linear(hidden, hidden)
        self.before_mlp = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self._attention(self.before_attention(x)))
        through: torch.Tensor = self.narrow(functional.gelu(self.widen(self.before_mlp(x))))
        return x + through

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        split = self.query_key_value(x).view(batch, sequence, 3, self._heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, sequence, hidden)


class Gpt(nn.Module):
    """A decoder with learned positions, its output layer tied to its embedding.

    `forward` returns the loss, so that nobody holds on to the logits.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Parameter(torch.zeros(shape.sequence, shape.hidden))
        self.blocks = nn.ModuleList(
            [_Block(shape.hidden, shape.heads) for _ in range(shape.layers)]
        )
        self.last_norm = nn.LayerNorm(shape.hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over `batch` sequences and the token that follows each."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(
            functional.linear(self.last_norm(x), self.embedding.weight).flatten(0, 1).float(),
            targets.flatten(),
        )


def build(shape: Shape, device: torch.device) -> Gpt:
    """Return the model on its device, with the same weights everywhere."""
    # The global generators belong to the other probes as much: fork them.
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        torch.manual_seed(SEED)
        with torch.device(device):
            return Gpt(shape)


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW, fused on an accelerator: the loop over tensors costs memory there."""
    fused = True if device.type == "cuda" else None  # None: torch chooses
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def mock_tokens(shape: Shape, device: torch.device) -> torch.Tensor:
    """Return random tokens, the same everywhere: `batch` sequences and their successors."""
    generator = torch.Generator().manual_seed(SEED)
    size = (shape.batch, shape.sequence + 1)
    return torch.randint(shape.vocabulary, size, generator=generator).to(device)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, context: ProbeContext
) -> None:
    """Forward, backward, optimizer: one step, waited for.

    Gradients are kept from step to step, as DDP keeps its buckets.
    """
    optimizer.zero_grad(set_to_none=False)
    with _autocast(context):
        loss = model(tokens)
    loss.backward()
    optimizer.step()
    context.synchronize()


def _autocast(context: ProbeContext) -> contextlib.AbstractContextManager[object]:
    """16-bit arithmetic on an accelerator, float32 elsewhere: many CPUs only emulate 16 bits."""
    if not context.on_cuda:
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=device.half_precision(context.device))


def first_line(err: BaseException) -> str:
    """Return the first line of an error; torch appends advice and stacks to some."""
    return (str(err).splitlines() or [type(err).__name__])[0][:200]


def return_memory(context: ProbeContext) -> None:
    """Give the memory of what is out of reach back to the device.

    An exception that is still being handled keeps its frames, and all their tensors, in reach.
    """
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
