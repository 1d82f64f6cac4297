# SPDX-License-Identifier: Apache-2.0
"""A GPT trained by a pair of nodes: arithmetic, communication and both overlapped. Scope: pair.

The steps of the first flavour have as many tokens as memory allows, and DDP hides communication
behind their arithmetic. Those of the light flavour have few, so that communication shows. How large
the GPT is, the round's options say, which `sizes` makes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.sizes import GptModel
from slurm_health.preflight.probes.timing import TimingPlan, timed
from slurm_health.preflight.probes.torch_device import half_precision, memory_bytes

# Allocations and the choice of kernels in the first; DDP arranges its buckets anew in the second.
_CUDA_PLAN = TimingPlan(warm_ups=2, budget_s=1.0, least=3, most=20)
# A window of steps on a CPU spans a period of a CPU quota (100 ms on Linux), as for matmul.
_CPU_PLAN = TimingPlan(warm_ups=2, budget_s=0.3, least=3, most=20, window_s=0.1)
# A peak above this share of what was free is too close to running out.
FULL = 0.85
# AdamW allocates its moments at the end of the first step: only the second has its peak.
_FIT_STEPS = 2
SEED = 20240
LEARNING_RATE = 1e-4


def measure(context: ProbeContext) -> list[Sample]:
    """Train for a few steps of both flavours; the same model everywhere, by the round's options.

    Returns:
        `compute` and `light_compute`: this worker's arithmetic alone. In a group also
        `communication`: the all-reduce of as many bytes as there are gradients, which is the
        same for both flavours; `step` and `light_step`: a step under DDP.

    Raises:
        NotMeasured: the device runs out of memory, or the options name no model.
    """
    shape = model_of(context)
    return_memory(context)
    free_bytes, total_bytes = memory_bytes(context.device)
    samples, lack = [], ""
    try:
        samples = _samples(context, shape)
    except (RuntimeError, MemoryError) as err:
        if not context.compute.is_out_of_memory(err):
            raise
        lack = _first_line(err)
    # Not before the exception is gone: it keeps the tensors of its frames alive.
    return_memory(context)
    if lack:
        raise NotMeasured(
            f"{context.device} ran out of memory training a GPT with a batch of {shape.batch};"
            f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB were free: {lack}"
        )
    return samples


def _samples(context: ProbeContext, shape: GptModel) -> list[Sample]:
    plan = _CUDA_PLAN if context.on_cuda else _CPU_PLAN
    model: nn.Module = build(shape, context.device)

    def trained(prefix: str, flavour: GptModel, quantity: str) -> Sample:
        """Time training steps of the model, bare or under DDP."""
        optimizer = optimizer_of(model, context.device)
        tokens = mock_tokens(flavour, context.device)
        step = functools.partial(train_step, model, optimizer, tokens, context)
        sample = timed(context, step, plan)
        return sample._replace(quantity=prefix + quantity, flop=flavour.flop_per_step)

    flavours = (("", shape), ("light_", shape.light))
    # Without DDP around it a model communicates nothing.
    samples = [trained(prefix, flavour, "compute") for prefix, flavour in flavours]
    if context.world_size == 1:
        return samples
    for parameter in model.parameters():
        parameter.grad = None  # from here on gradients live in the buckets of DDP
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    # Zeros stay zeros however often they are added up, and travel no faster than other numbers.
    gradients = torch.zeros(gradient_bytes // 4, device=context.device)
    all_reduce = functools.partial(dist.all_reduce, gradients)
    alone = timed(context, all_reduce, plan._replace(window_s=0.0))
    del gradients, all_reduce
    shared = [alone._replace(quantity="communication")]
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    shared += [trained(prefix, flavour, "step") for prefix, flavour in flavours]
    return samples + [sample._replace(shared=True, total_bytes=gradient_bytes) for sample in shared]


def measure_fit(context: ProbeContext) -> list[Sample]:
    """Train alone for two steps, with half the batch each time it does not fit.

    Returns:
        One sample of figures: `micro_batch` that fits, `peak_bytes` of its steps, `free_bytes`
        before them, `total_bytes` of the device.

    Raises:
        NotMeasured: a single sequence does not fit.
    """
    shape = model_of(context)
    return_memory(context)
    free_bytes, total_bytes = memory_bytes(context.device)
    # A CPU's process has its peak on record since its start: hold it against the whole machine.
    usable_bytes = free_bytes if context.on_cuda else total_bytes
    lack = ""
    while shape.batch >= 1:
        try:
            peak_bytes = _peak_bytes(context, shape)
            lack = f"a step takes {peak_bytes / 1e9:.1f} GB, more than {100 * FULL:.0f} % of that"
        except (RuntimeError, MemoryError) as err:
            if not context.compute.is_out_of_memory(err):
                raise
            peak_bytes, lack = None, f"it ran out: {_first_line(err)}"
        return_memory(context)
        if peak_bytes is not None and peak_bytes <= FULL * usable_bytes:
            return [
                Sample(
                    figures={
                        "micro_batch": shape.batch,
                        "peak_bytes": peak_bytes,
                        "free_bytes": free_bytes,
                        "total_bytes": total_bytes,
                    }
                )
            ]
        shape = shape._replace(batch=shape.batch // 2)
    raise NotMeasured(
        f"the GPT of this run does not fit {context.device} even with a batch of one:"
        f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free, and {lack}"
    )


def _peak_bytes(context: ProbeContext, shape: GptModel) -> int:
    if context.on_cuda:
        torch.cuda.reset_peak_memory_stats(context.device)
    model = build(shape, context.device)
    optimizer = optimizer_of(model, context.device)
    tokens = mock_tokens(shape, context.device)
    for _ in range(_FIT_STEPS):
        train_step(model, optimizer, tokens, context)
    if context.on_cuda:
        # Reserved, not allocated: gaps between tensors are gone for others too.
        return int(torch.cuda.max_memory_reserved(context.device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def model_of(context: ProbeContext) -> GptModel:
    """Return the model that the round's options ask for.

    Raises:
        NotMeasured: they ask for none.
    """
    names = [f"gpt_{name}" for name in GptModel._fields]
    missing = [name for name in names if name not in context.options]
    if missing:
        raise NotMeasured(f"the round does not say which GPT to train: no {', '.join(missing)}")
    return GptModel(*(int(context.options[name]) for name in names))


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
        batch, sequence, hidden = x.shape
        split = self.query_key_value(self.before_attention(x))
        split = split.view(batch, sequence, 3, self._heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        through: torch.Tensor = self.narrow(functional.gelu(self.widen(self.before_mlp(x))))
        return x + through


class Gpt(nn.Module):
    """A decoder with learned positions, its output layer tied to its embedding.

    `forward` returns the loss, so that nobody holds on to the logits.
    """

    def __init__(self, shape: GptModel) -> None:
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


def build(shape: GptModel, device: torch.device) -> Gpt:
    """Return the model on its device, with the same weights everywhere."""
    # The global generators belong to the other probes as much: fork them.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        with torch.device(device):
            return Gpt(shape)


def optimizer_of(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW, fused on an accelerator: the loop over tensors costs memory there."""
    fused = True if device.type == "cuda" else None  # None: torch chooses
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)


def mock_tokens(shape: GptModel, device: torch.device) -> torch.Tensor:
    """Return random tokens, the same everywhere: `batch` sequences and their successors."""
    generator = torch.Generator().manual_seed(SEED)
    size = (shape.batch, shape.sequence + 1)
    return torch.randint(shape.vocabulary, size, generator=generator).to(device)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, context: ProbeContext
) -> None:
    """Forward, backward, optimizer: one step, waited for.

    Gradients are kept from step to step, as DDP keeps its buckets. Arithmetic has 16 bits on an
    accelerator, and float32 elsewhere: many CPUs only emulate 16 bits.
    """
    optimizer.zero_grad(set_to_none=False)
    halved: Any = contextlib.nullcontext()
    if context.on_cuda:
        halved = torch.autocast("cuda", dtype=half_precision(context.device))
    with halved:
        loss = model(tokens)
    loss.backward()
    optimizer.step()
    context.synchronize()


def _first_line(err: BaseException) -> str:
    """Return the first line of an error; torch appends advice and stacks to some."""
    return (str(err).splitlines() or [type(err).__name__])[0][:200]


def return_memory(context: ProbeContext) -> None:
    """Give the memory of what is out of reach back to the device.

    An exception that is still being handled keeps its frames, and all their tensors, in reach.
    """
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
