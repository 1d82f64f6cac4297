# SPDX-License-Identifier: Apache-2.0
"""The table of models is true of the model that torch really builds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slurm_health.preflight.probes.gpt import Gpt, optimizer_of, shape_of
from slurm_health.preflight.session.gpt_sizing import (
    CONTEXT_BYTES,
    CPU,
    TABLE,
    GptModel,
    bytes_needed,
    parameters,
    to_options,
)

pytestmark = pytest.mark.torch


def ids(models: tuple[GptModel, ...]) -> list[str]:
    return [f"{model.layers}x{model.hidden}" for model in models]


def on_the_meta_device(model: GptModel) -> Gpt:
    with torch.device("meta"):
        return Gpt(shape_of(to_options(model)))


@pytest.mark.parametrize("model", [*TABLE, CPU], ids=ids((*TABLE, CPU)))
def test_a_row_has_as_many_parameters_as_the_model_torch_builds(model: GptModel) -> None:
    built = on_the_meta_device(model)

    assert sum(each.numel() for each in built.parameters()) == parameters(model)
    assert model.hidden % model.heads == 0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that live, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.now -= size


def peak_of_a_real_step(model: GptModel) -> int:
    """Run a step of a model whose tensors know their size and hold nothing."""
    shape = shape_of(to_options(model))
    device = torch.device("cpu")
    live = LiveBytes()
    with FakeTensorMode(), live:
        built = Gpt(shape)
        optimizer = optimizer_of(built, device)
        for each in built.parameters():
            each.grad = torch.empty_like(each)
        optimizer.step()
        tokens = torch.zeros(shape.batch, shape.sequence + 1, dtype=torch.int64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = built(tokens)
        loss.backward()
    return live.peak


@pytest.mark.parametrize(
    "model",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.layers >= 24)) for each in TABLE],
    ids=ids(TABLE),
)
def test_a_rows_estimate_of_memory_is_what_a_step_of_that_size_takes(model: GptModel) -> None:
    estimate = bytes_needed(model)

    assert estimate - CONTEXT_BYTES == pytest.approx(peak_of_a_real_step(model), rel=0.02)
