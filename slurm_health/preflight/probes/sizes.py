# SPDX-License-Identifier: Apache-2.0
"""How much work the probes give to the devices of a run: the same on all of its nodes. Pure.

What a current GPU does in milliseconds takes a small device minutes. So each worker measures for a
moment how fast its device is, and the work of the whole run follows from that: times are compared
between nodes, and only the same work can be. A device that reaches `FULL_GFLOP_PER_S` and
`FULL_GB_PER_S`, as every GPU of the last ten years does at its lowest clock, gets the full work.

The GPT of the GPT rounds is the row of a table that is meant for the smallest device of a run. Its
batch is what fits by trying (the probe `gpt_fit`). GB is 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from slurm_health.records.records import WorkersReady

FULL_GFLOP_PER_S = 2000.0
FULL_GB_PER_S = 100.0
# Of slower devices: what one product, and one copy, may take.
PRODUCT_S, COPY_S = 0.01, 0.005
LEAST_SIZE, LEAST_COPY_BYTES, LEAST_GATHER_BYTES = 128, 1 << 20, 256 << 10
_COPIES_PER_GATHER = 64  # the parts of all ranks come to about as much as a copy
# All that a probe holds at once, in arrays of the size that is chosen here.
_MATRICES, _COPIES = 16, 4
_COPIES_PER_PATTERN = 4  # 18 patterns, each written and read, come to a second


class Work(NamedTuple):
    """One iteration of each probe on accelerators.

    `matmul_size` is rows and columns of a product, `exact_products` how many are compared,
    `gather_bytes` what each rank sends, `pattern_bytes` how much memory is tested at most: half of
    what is free, if that is less.
    """

    matmul_size: int = 8192
    exact_products: int = 200
    copy_bytes: int = 2 << 30
    gather_bytes: int = 128 << 20
    pattern_bytes: int = 1 << 40

    def options(self) -> dict[str, int]:
        """Return the options of a round that make every worker do this work."""
        return self._asdict()

    def reduced(self) -> frozenset[str]:
        """Return the probes that do less than their full work: peaks say nothing of these."""
        less = {
            "matmul": self.matmul_size < FULL.matmul_size,
            "memory_copy": self.copy_bytes < FULL.copy_bytes,
            "node_allgather": self.gather_bytes < FULL.gather_bytes,
            "rail_allgather": self.gather_bytes < FULL.gather_bytes,
            "allgather": self.gather_bytes < FULL.gather_bytes,
        }
        return frozenset(probe for probe, is_less in less.items() if is_less)


FULL = Work()


def work_for(nodes: Sequence[WorkersReady]) -> Work:
    """Return the work of a run with these accelerators.

    It fits the smallest memory, and is sized for the typical speed: a slow device among fast ones
    is what the run is to find. A speed or a memory of 0 is not known, and restricts nothing.

    Args:
        nodes: what each said when its workers were ready for the first time.
    """
    gflop_per_s = typical_gflop_per_s(nodes)
    gb_per_s = _typical(node.memory_gb_per_s for node in nodes)
    free_bytes = min((node.free_bytes for node in nodes if node.free_bytes), default=0)
    devices = max((len(node.devices) for node in nodes), default=1)
    size, products, copy_bytes, gather_bytes, pattern_bytes = FULL
    if gflop_per_s and gflop_per_s < FULL_GFLOP_PER_S:
        while size > LEAST_SIZE and 2.0 * size**3 > gflop_per_s * 1e9 * PRODUCT_S:
            size //= 2
        products //= 20
    if gb_per_s and gb_per_s < FULL_GB_PER_S:
        copy_bytes = max(LEAST_COPY_BYTES, _power_of_two(int(gb_per_s * 1e9 * COPY_S / 2)))
        gather_bytes = max(LEAST_GATHER_BYTES, copy_bytes // _COPIES_PER_GATHER)
        pattern_bytes = copy_bytes * _COPIES_PER_PATTERN
    if free_bytes:
        while size > LEAST_SIZE and _MATRICES * 2 * size**2 > free_bytes:
            size //= 2
        copy_bytes = min(copy_bytes, _power_of_two(free_bytes // _COPIES))
        gather_bytes = min(gather_bytes, _power_of_two(free_bytes // (_COPIES * 2 * devices)))
    return Work(size, products, copy_bytes, gather_bytes, pattern_bytes)


def typical_gflop_per_s(nodes: Iterable[WorkersReady]) -> float:
    """Return how fast a typical node multiplies matrices, 0 where that is not known."""
    return _typical(node.gflop_per_s for node in nodes)


def _typical(speeds: Iterable[float]) -> float:
    """Return the higher median: of two nodes the faster one, so that the other shows as slow."""
    known = sorted(speed for speed in speeds if speed > 0)
    return known[len(known) // 2] if known else 0.0


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above it."""
    return 1 << max(0, number.bit_length() - 1)


# The GPT rounds.

# Tokens of a step that is mostly communication: at 16 times as many it hides behind the arithmetic.
LIGHT_TOKENS = 2048
# A step of the model meant for a device takes a third of a second there, on any current one.
STEP_S = 10.0
VOCABULARY = 50304


class GptModel(NamedTuple):
    """Shape of a model and of one step: `batch` sequences of `sequence` tokens per device."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int = VOCABULARY

    @property
    def parameters(self) -> int:
        """The number of parameters, the tied output layer counted once."""
        h = self.hidden
        blocks = self.layers * (12 * h * h + 13 * h)
        return blocks + (self.vocabulary + self.sequence) * h + 2 * h

    @property
    def flop_per_step(self) -> float:
        """The floating-point operations of forward and backward pass of one device.

        6 per parameter and token, and 12 * layers * hidden * sequence per token for attention,
        which is counted in full although causal kernels skip half of it.
        """
        attention = 12 * self.layers * self.hidden * self.sequence
        return float((6 * self.parameters + attention) * self.sequence * self.batch)

    @property
    def light(self) -> GptModel:
        """The communication-heavy flavour: the same gradients after far fewer tokens."""
        batch = min(LIGHT_TOKENS // self.sequence, self.batch // 2)
        return self._replace(batch=max(1, batch))

    def options(self) -> dict[str, int]:
        """Return the options of a round that make every worker build this model."""
        return {f"gpt_{name}": value for name, value in self._asdict().items()}


# From the smallest to the largest, each with how many GB of memory must be free for it, and the
# devices it is meant for by theirs.
TABLE = (
    (7.0, GptModel(12, 512, 8, 512, 8)),  # 8 GB
    (14.0, GptModel(12, 768, 12, 1024, 8)),  # 16 GB
    (19.8, GptModel(16, 1024, 16, 1024, 8)),  # 24 GB
    (33.3, GptModel(24, 1024, 16, 1024, 12)),  # 32 GB
    (41.2, GptModel(24, 1280, 20, 1024, 12)),  # 40 and 48 GB
    (70.6, GptModel(24, 1536, 24, 2048, 10)),  # 80 GB
    (121.0, GptModel(24, 2048, 16, 2048, 14)),  # 141 GB
    (168.4, GptModel(32, 2048, 16, 2048, 16)),  # 180 GB and more
)
# A step takes well below a third of a second on one slow core.
CPU = GptModel(layers=2, hidden=128, heads=4, sequence=128, batch=4, vocabulary=512)


def choose(free_bytes: int, gflop_per_s: float = 0.0) -> GptModel:
    """Return the largest model that is meant for the smallest device of a run, and its speed.

    Args:
        free_bytes: free memory of the device that has least of it, before anything is loaded.
        gflop_per_s: how fast devices multiply matrices, 0 where that is not known. On those that
            would take more than `STEP_S` for the smallest model, that of CPUs is trained.
    """
    for least_gb, model in reversed(TABLE):
        fits = least_gb * 1e9 <= free_bytes or model is TABLE[0][1]
        if fits and (not gflop_per_s or model.flop_per_step <= gflop_per_s * 1e9 * STEP_S):
            return model
    return CPU


def gpt_options(
    free_bytes: Sequence[int], batches: Sequence[int], gflop_per_s: float = 0.0
) -> dict[str, Any]:
    """Return the options of a round in which all nodes train the same model.

    Args:
        free_bytes: the least free memory of a device of each node; empty where they are CPUs.
        batches: what fits by trying, one for each node that tried.
        gflop_per_s: how fast a device multiplies matrices; 0 where that is not known.
    """
    model = choose(min(free_bytes), gflop_per_s) if free_bytes else CPU
    return model._replace(batch=min([model.batch, *batches])).options()
