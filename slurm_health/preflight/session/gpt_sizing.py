# SPDX-License-Identifier: Apache-2.0
"""Which GPT a run trains for its GPT rounds: the largest that fits its smallest device. Pure.

The model is that of `preflight.probes.gpt`: pre-norm blocks, learned positions, the
output layer tied to the embedding, AdamW, DDP. All sizes are bytes, GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from slurm_health.records.records import Figure

# Of the free memory, what is taken: the rest is for the communication library and for others.
OURS = 0.9
# A step that takes more than this of what it may use is too close to running out.
FULL = 0.85
# Tokens of a step that is mostly communication: at 16 times as many it hides behind the arithmetic.
LIGHT_TOKENS = 2048
# A step of the model meant for a device takes a third of a second there, on any current one.
STEP_S = 10.0
VOCABULARY = 50304
# Driver context, kernels and the workspaces of the matrix library.
CONTEXT_BYTES = 800_000_000
_PREFIX = "gpt_"


@dataclass(frozen=True, kw_only=True)
class GptModel:
    """Shape of a model and of one step: `batch` sequences of `sequence` tokens per device."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int = VOCABULARY

    @property
    def tokens(self) -> int:
        """Tokens of one step of one device."""
        return self.sequence * self.batch


@dataclass(frozen=True, kw_only=True)
class TooLittleMemory:
    """No model of the table fits, not even its smallest with a single sequence."""

    free_bytes: int
    needed_bytes: int

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return (
            f"{self.free_bytes / 1e9:.1f} GB of device memory are free, the smallest GPT needs"
            f" {self.needed_bytes / 1e9:.1f} GB; free the device, or leave the GPT rounds out"
        )


def _row(layers: int, hidden: int, heads: int, sequence: int, batch: int) -> GptModel:
    return GptModel(layers=layers, hidden=hidden, heads=heads, sequence=sequence, batch=batch)


# From the smallest to the largest. The comment names the devices it is meant for, by their memory.
TABLE = (
    _row(12, 512, 8, 512, 8),  # 8 GB
    _row(12, 768, 12, 1024, 8),  # 16 GB
    _row(16, 1024, 16, 1024, 8),  # 24 GB
    _row(24, 1024, 16, 1024, 12),  # 32 GB
    _row(24, 1280, 20, 1024, 12),  # 40 and 48 GB
    _row(24, 1536, 24, 2048, 10),  # 80 GB
    _row(24, 2048, 16, 2048, 14),  # 141 GB
    _row(32, 2048, 16, 2048, 16),  # 180 GB and more
)
# A step takes well below a third of a second on one slow core.
CPU = GptModel(layers=2, hidden=128, heads=4, sequence=128, batch=4, vocabulary=512)


def choose(free_bytes: int, gflop_per_s: float = 0.0) -> GptModel | TooLittleMemory:
    """Return the largest model whose step fits the smallest device of the run, and its speed.

    Args:
        free_bytes: free memory of the device that has least of it, before anything is loaded.
        gflop_per_s: how fast devices multiply matrices, 0 where that is not known. On those that
            would take more than `STEP_S` for the smallest model, that of CPUs is trained.
    """
    models = (*reversed(TABLE), *_halves(TABLE[0]))
    fitting = [model for model in models if least_free_bytes(model) <= free_bytes]
    for model in fitting:
        if flop_per_step(model) <= (gflop_per_s or math.inf) * 1e9 * STEP_S:
            return model
    if fitting:
        return CPU
    return TooLittleMemory(free_bytes=free_bytes, needed_bytes=least_free_bytes(models[-1]))


def least_free_bytes(model: GptModel) -> int:
    """Return how much must be free for a model to be chosen."""
    return round(bytes_needed(model) / (OURS * FULL))


def _halves(model: GptModel) -> Iterator[GptModel]:
    """Yield the model with half the batch, a quarter of it, and so on."""
    while model.batch > 1:
        model = replace(model, batch=model.batch // 2)
        yield model


def light(model: GptModel) -> GptModel:
    """Return the communication-heavy flavour: the same gradients after far fewer tokens."""
    batch = min(LIGHT_TOKENS // model.sequence, model.batch // 2)
    return replace(model, batch=max(1, batch))


def parameters(model: GptModel) -> int:
    """Return the number of parameters, the tied output layer counted once."""
    h = model.hidden
    blocks = model.layers * (12 * h * h + 13 * h)
    return blocks + (model.vocabulary + model.sequence) * h + 2 * h


def bytes_needed(model: GptModel) -> int:
    """Return what a training step on a device with 16-bit arithmetic takes at its peak.

    Per parameter: float32 value and gradient, two float32 moments of AdamW (16 bytes), and the
    16-bit copy that autocast keeps (2 bytes). Per token, layer and hidden unit: 36 bytes that
    the backward pass needs (see docs/explanation/gpt-rounds.md). Per logit: 12 bytes when the
    backward pass begins, three float32 arrays: the softmax, its gradient and the result.
    """
    activations = 36 * model.hidden * model.layers * model.tokens
    logits = 12 * model.tokens * model.vocabulary
    return (16 + 2) * parameters(model) + activations + logits + CONTEXT_BYTES


def flop_per_step(model: GptModel) -> float:
    """Return the floating-point operations of forward and backward pass of one device.

    6 per parameter and token, and 12 * layers * hidden * sequence per token for attention, which
    is counted in full although causal kernels skip half of it.
    """
    attention = 12 * model.layers * model.hidden * model.sequence
    return float((6 * parameters(model) + attention) * model.tokens)


def to_options(model: GptModel) -> dict[str, Figure]:
    """Return the options of a round that make every worker build this model."""
    shape: dict[str, Figure] = {
        _PREFIX + each.name: getattr(model, each.name) for each in fields(model)
    }
    return {**shape, "gpt_light_batch": light(model).batch, "gpt_flop": flop_per_step(model)}


def options_for(
    free_bytes: Sequence[int], batches: Sequence[int], gflop_per_s: float = 0.0
) -> dict[str, Figure]:
    """Return the options of a round in which all nodes train the same model.

    Args:
        free_bytes: the least free memory of a device of each node; empty where they are CPUs.
        batches: what was found to fit by trying, one for each node that tried.
        gflop_per_s: how fast a device multiplies matrices; 0 where that is not known.
    """
    model = choose(min(free_bytes), gflop_per_s) if free_bytes else CPU
    if isinstance(model, TooLittleMemory):
        return {"gpt_refused": str(model)}
    return to_options(replace(model, batch=min([model.batch, *batches])))
