# SPDX-License-Identifier: Apache-2.0
"""A GPT trained by a pair of nodes: arithmetic, communication and both overlapped. Scope: pair.

The steps of the first flavour have as many tokens as memory allows, and DDP hides communication
behind their arithmetic. Those of the light flavour have few, so that communication shows. How large
the GPT is, `slurm_health.preflight.session.gpt_sizing` knows; a test holds the two together.
"""

from __future__ import annotations

import contextlib
import gc
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from slurm_health.preflight.probes import device
from slurm_health.preflight.probes.context import NotMeasured, ProbeContext, Sample
from slurm_health.preflight.probes.timing import TimingPlan, timed

# Allocations and the choice of kernels in the first; DDP arranges its buckets anew in the second.
WARM_UP_ITERATIONS = 2
# A window of steps on a CPU spans a period of a CPU quota (100 ms on Linux), as for matmul.
CPU_WINDOW_S = 0.1
CPU_BUDGET_S = 0.3
CUDA_BUDGET_S = 1.0
MIN_WINDOWS = 3
MAX_WINDOWS = 20


@dataclass(frozen=True)
class _Flavour:
    """Quantities with this prefix are of steps of this shape and work."""

    prefix: str
    shape: Shape
    flop: float


def measure(context: ProbeContext) -> list[Sample]:
    """Train for a few steps of both flavours; the same model everywhere, by the round's options.

    Returns:
        `compute` and `light_compute`: this worker's arithmetic alone. In a group also
        `communication`: the all-reduce of as many bytes as there are gradients, which is the
        same for both flavours; `step` and `light_step`: a step under DDP.

    Raises:
        NotMeasured: the device runs out of memory, or the options name no model.
    """
    shape = shape_of(context.options)
    return_memory(context)
    free_bytes, total_bytes = device.memory_bytes(context.device)
    said = ""
    samples: list[Sample] = []
    try:
        samples = _samples(context, shape)
    except (RuntimeError, MemoryError) as err:
        if not device.is_out_of_memory(err):
            raise
        said = first_line(err)
    # Not before the exception is gone: it keeps the tensors of its frames alive.
    return_memory(context)
    if said:
        raise NotMeasured(
            f"{context.device} ran out of memory training a GPT with a batch of {shape.batch};"
            f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB were free: {said}"
        )
    return samples


def _samples(context: ProbeContext, shape: Shape) -> list[Sample]:
    flavours = _flavours(context, shape)
    model = build(shape, context.device)
    # Without DDP around it a model communicates nothing.
    samples = [_trained(context, model, each, "compute") for each in flavours]
    if context.world_size == 1:
        return samples
    for parameter in model.parameters():
        parameter.grad = None  # from here on gradients live in the buckets of DDP
    gradient_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    samples.append(_communication(context, gradient_bytes))
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for each in flavours:
        step = _trained(context, wrapped, each, "step")
        samples.append(step._replace(shared=True, total_bytes=gradient_bytes))
    return samples


def _flavours(context: ProbeContext, shape: Shape) -> tuple[_Flavour, _Flavour]:
    light_batch = int(context.options.get("gpt_light_batch", max(1, shape.batch // 2)))
    flop = float(context.options.get("gpt_flop", 0.0))
    return (
        _Flavour("", shape, flop),
        _Flavour("light_", replace(shape, batch=light_batch), flop * light_batch / shape.batch),
    )


def _trained(context: ProbeContext, model: nn.Module, flavour: _Flavour, quantity: str) -> Sample:
    """Time training steps of a model, bare or under DDP."""
    optimizer = optimizer_of(model, context.device)
    tokens = mock_tokens(flavour.shape, context.device)

    def step() -> None:
        train_step(model, optimizer, tokens, context)

    window_s = 0.0 if context.on_cuda else CPU_WINDOW_S
    sample = timed(context, step, _pace(context, window_s))
    return sample._replace(quantity=flavour.prefix + quantity, flop=flavour.flop)


def _communication(context: ProbeContext, gradient_bytes: int) -> Sample:
    # Zeros stay zeros however often they are added up, and travel no faster than other numbers.
    gradients = torch.zeros(gradient_bytes // 4, device=context.device)

    def all_reduce() -> None:
        dist.all_reduce(gradients)

    sample = timed(context, all_reduce, _pace(context))
    return sample._replace(quantity="communication", shared=True, total_bytes=gradient_bytes)


def _pace(context: ProbeContext, window_s: float = 0.0) -> TimingPlan:
    return TimingPlan(
        warm_ups=WARM_UP_ITERATIONS,
        budget_s=CUDA_BUDGET_S if context.on_cuda else CPU_BUDGET_S,
        least=MIN_WINDOWS,
        most=MAX_WINDOWS,
        window_s=window_s,
    )


# A peak above this share of what was free is too close to running out.
FULL = 0.85
# AdamW allocates its moments at the end of the first step: only the second has its peak.
_FIT_STEPS = 2


def measure_fit(context: ProbeContext) -> list[Sample]:
    """Train alone for two steps, with half the batch each time it does not fit.

    Returns:
        One sample of figures: `micro_batch` that fits, `peak_bytes` of its steps, `free_bytes`
        before them, `total_bytes` of the device.

    Raises:
        NotMeasured: a single sequence does not fit.
    """
    shape = shape_of(context.options)
    return_memory(context)
    free_bytes, total_bytes = device.memory_bytes(context.device)
    # A CPU's process has its peak on record since its start: hold it against the whole machine.
    usable_bytes = free_bytes if context.on_cuda else total_bytes
    batch = shape.batch
    said = ""
    while batch >= 1:
        peak_bytes, said = _try(context, replace(shape, batch=batch))
        return_memory(context)
        if peak_bytes is not None and peak_bytes <= FULL * usable_bytes:
            return [
                Sample(
                    figures={
                        "micro_batch": batch,
                        "peak_bytes": peak_bytes,
                        "free_bytes": free_bytes,
                        "total_bytes": total_bytes,
                    }
                )
            ]
        batch //= 2
    raise NotMeasured(
        f"the GPT of this run does not fit {context.device} even with a batch of one:"
        f" {free_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are free, {said}"
    )


def _try(context: ProbeContext, shape: Shape) -> tuple[int | None, str]:
    """Return the peak of a step, None where the memory ran out, and either in words."""
    try:
        peak_bytes = _peak_bytes(context, shape)
    except (RuntimeError, MemoryError) as err:
        if not device.is_out_of_memory(err):
            raise
        return None, f"and it ran out: {first_line(err)}"
    return peak_bytes, f"and a step takes {peak_bytes / 1e9:.1f} GB, more than {FULL:.0%} of that"


def _peak_bytes(context: ProbeContext, shape: Shape) -> int:
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
