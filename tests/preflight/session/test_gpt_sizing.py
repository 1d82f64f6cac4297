# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the table of models; test_gpt_model.py of the probes holds it against torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slurm_health.preflight.session.gpt_sizing import (
    CPU,
    FULL,
    LIGHT_TOKENS,
    OURS,
    TABLE,
    GptModel,
    TooLittleMemory,
    bytes_needed,
    choose,
    flop_per_step,
    least_free_bytes,
    light,
    parameters,
    to_options,
)

PAGE = Path(__file__).parents[3] / "docs/explanation/gpt-rounds.md"
# What idle devices report as theirs, and the row meant for them. An "8 GB" device has 8 GiB.
DEVICES = [
    ("8 GiB", 8 << 30, 0),
    ("16 GiB", 16 << 30, 1),
    ("24 GiB", 24 << 30, 2),
    ("32 GiB", 32 << 30, 3),
    ("40 GiB", 40 << 30, 4),
    ("48 GB less ECC", 45 << 30, 4),
    ("80 GB H100", 85_000_000_000, 5),
    ("141 GB H200", 150_000_000_000, 6),
    ("180 GB B200", 191_000_000_000, 7),
    ("192 GiB MI300X", 192 << 30, 7),
]


def ids(models: Sequence[GptModel]) -> list[str]:
    return [f"{model.layers}x{model.hidden}" for model in models]


@pytest.mark.parametrize("model", TABLE, ids=ids(TABLE))
def test_a_rows_operations_are_those_of_its_matrices(model: GptModel) -> None:
    """Forward and backward pass: three times two operations per weight that meets a token."""
    h, s, tokens = model.hidden, model.sequence, model.tokens
    weights = model.layers * (3 * h * h + h * h + 4 * h * h + 4 * h * h) + model.vocabulary * h
    scores_and_mix = model.layers * 2 * (2 * s * h)
    exact = 3 * (2 * weights + scores_and_mix) * tokens

    assert flop_per_step(model) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(("name", "device_bytes", "row"), DEVICES, ids=[d[0] for d in DEVICES])
def test_a_device_gets_the_row_meant_for_it_which_fills_much_and_not_too_much(
    name: str, device_bytes: int, row: int
) -> None:
    free_bytes = device_bytes - 500_000_000
    model = choose(free_bytes)

    assert model == TABLE[row]
    assert 0.55 < bytes_needed(TABLE[row]) / device_bytes < FULL


def test_rows_grow_and_their_estimates_stay_below_what_a_measured_step_may_take() -> None:
    needed = [least_free_bytes(model) for model in TABLE]

    assert needed == sorted(needed)
    for model, free_bytes in zip(TABLE, needed, strict=True):
        assert bytes_needed(model) <= OURS * FULL * free_bytes + 1


def test_below_the_smallest_row_the_batch_shrinks_and_then_the_answer_is_a_refusal() -> None:
    smallest = TABLE[0]
    tight = choose(least_free_bytes(smallest) - 1)
    assert isinstance(tight, GptModel)
    assert tight.batch == smallest.batch // 2

    refused = choose(2_000_000_000)
    assert isinstance(refused, TooLittleMemory)
    assert refused.free_bytes == 2_000_000_000
    assert choose(refused.needed_bytes - 1) == TooLittleMemory(
        free_bytes=refused.needed_bytes - 1, needed_bytes=refused.needed_bytes
    )
    assert choose(refused.needed_bytes) != refused
    assert "2.0 GB of device memory are free, the smallest GPT needs 3.1 GB" in str(refused)


def test_a_batch_is_halved_down_to_one() -> None:
    needed = [least_free_bytes(replace(TABLE[0], batch=batch)) for batch in (4, 2, 1)]

    chosen = [choose(free_bytes) for free_bytes in needed]

    assert [each.batch for each in chosen if isinstance(each, GptModel)] == [4, 2, 1]


@pytest.mark.parametrize("model", TABLE, ids=ids(TABLE))
def test_the_light_flavour_has_the_same_gradients_after_two_thousand_tokens(
    model: GptModel,
) -> None:
    flavour = light(model)

    assert parameters(flavour) == parameters(model)
    assert flavour.tokens == LIGHT_TOKENS
    assert flavour.tokens < model.tokens


def test_every_worker_is_told_the_whole_model() -> None:
    for model in (*TABLE, CPU):
        options = to_options(model)
        told = {name: int(options[f"gpt_{name}"]) for name in asdict(model)}
        assert GptModel(**told) == model
        assert options["gpt_light_batch"] == light(model).batch


def test_the_documentation_has_the_table_of_the_code() -> None:
    found = re.findall(r"^\| (\d+\.\d .*) \|$", PAGE.read_text(), re.MULTILINE)

    assert found == [documented(model) for model in TABLE]


def documented(model: GptModel) -> str:
    columns = (
        f"{least_free_bytes(model) / 1e9:.1f}",
        f"{model.layers} / {model.hidden} / {model.heads}",
        model.sequence,
        model.batch,
        f"{parameters(model) / 1e6:.0f}",
        f"{bytes_needed(model) / 1e9:.1f}",
        f"{flop_per_step(model) / 1e12:.1f}",
        light(model).batch,
    )
    return " | ".join(str(column) for column in columns)
