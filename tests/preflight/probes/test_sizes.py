# SPDX-License-Identifier: Apache-2.0

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_health.preflight.expectations import expectations_from, expected_ms
from slurm_health.preflight.probes.sizes import (
    CPU,
    FULL,
    TABLE,
    GptModel,
    choose,
    gpt_options,
    work_for,
)
from slurm_health.records.records import AgentsLaunched, NodesAdmitted, RoundStarted, WorkersReady
from tests.support.rows import rows
from tests.support.session_story import Story, ready, started

H100 = {"gflop_per_s": 300_000.0, "memory_gb_per_s": 2500.0, "free_bytes": 84_000_000_000}
SMALL = {"gflop_per_s": 1.0, "memory_gb_per_s": 8.0, "free_bytes": 2 << 30}


def node(name: str, **device: Any) -> WorkersReady:
    return replace(ready(name, devices=8), backend="nccl", model="GPU", **device)


IDLE = {**H100, "gflop_per_s": 6000.0, "memory_gb_per_s": 250.0}
SICK = {**H100, "gflop_per_s": 900.0, "memory_gb_per_s": 50.0}


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param([H100] * 2, id="at its clock"),
        pytest.param([IDLE] * 2, id="at their lowest clock"),
        pytest.param([{"free_bytes": 84_000_000_000}], id="of unknown speed"),
        pytest.param([SICK, H100], id="one of two is slow"),
        pytest.param([SICK, *[H100] * 4], id="one of five is slow"),
    ],
)
def test_gpus_do_the_full_work(devices: list[dict[str, float]]) -> None:
    assert work_for([node(f"n{n}", **device) for n, device in enumerate(devices)]) == FULL


def test_small_devices_get_work_of_milliseconds() -> None:
    work = work_for([node("n1", **SMALL), node("n2", **SMALL)])

    assert 2.0 * work.matmul_size**3 <= 1.0e9 * 0.02
    assert 2 * work.copy_bytes / 8e9 <= 0.01
    assert work.gather_bytes < work.copy_bytes
    assert work.exact_products < FULL.exact_products
    assert work.pattern_bytes <= 8 * work.copy_bytes


def test_the_work_fits_the_device_with_the_least_memory() -> None:
    work = work_for([node("n1", **{**H100, "free_bytes": 1 << 30}), node("n2", **H100)])

    assert 3 * 2 * work.matmul_size**2 < 1 << 30
    assert 2 * work.copy_bytes <= 1 << 29
    assert 2 * 8 * work.gather_bytes <= 1 << 30


def test_all_rounds_of_a_run_name_the_same_work_whoever_is_ready_later() -> None:
    story = Story(("n1", "n2"))
    story.does(AgentsLaunched)
    story.says(started("n1"), node("n1", **SMALL), started("n2"), node("n2", **SMALL))
    story.does(NodesAdmitted)
    story.says(node("n1", **H100), node("n2", **H100))

    begun = story.does(RoundStarted)

    assert begun.options == work_for([node("n1", **SMALL), node("n2", **SMALL)]).options()


def test_peaks_say_nothing_of_work_that_is_less_than_full() -> None:
    models = {"n1": "NVIDIA H200", "n2": "NVIDIA H200"}
    known = expectations_from({}, "site")

    assert {"matmul", "memory_copy"} <= expected_ms(models, known).keys()
    assert not FULL.reduced()
    small = FULL._replace(matmul_size=128, copy_bytes=1 << 20, gather_bytes=1 << 14)
    assert not expected_ms(models, known, reduced=small.reduced())


def test_a_slow_device_trains_the_largest_model_with_steps_of_seconds() -> None:
    model = choose(85_000_000_000, 2000.0)

    assert model in [row for _, row in TABLE[:5]]
    assert model.flop_per_step <= 10 * 2000e9
    assert choose(85_000_000_000, 1.0) == CPU


PAGE = Path(__file__).parents[3] / "docs/explanation/gpt-rounds.md"


@rows
def test_a_device_gets_the_row_meant_for_it(name: str, device_bytes: int, row: int) -> None:
    assert choose(device_bytes - 500_000_000) == TABLE[row][1]


def test_the_run_trains_with_the_smallest_batch_that_fits_any_device() -> None:
    options = gpt_options([85_000_000_000, 150_000_000_000], [10, 4])

    assert options["gpt_batch"] == 4
    assert options["gpt_hidden"] == TABLE[5][1].hidden
    assert gpt_options([], [])["gpt_hidden"] == CPU.hidden


def test_the_documentation_has_the_table_of_the_code() -> None:
    found = re.findall(r"^\| (\d+\.\d .*) \|$", PAGE.read_text(), re.MULTILINE)

    assert found == [documented(*row) for row in TABLE]


def documented(least_gb: float, model: GptModel) -> str:
    columns = (
        f"{least_gb:.1f}",
        f"{model.layers} / {model.hidden} / {model.heads}",
        model.sequence,
        model.batch,
        f"{model.parameters / 1e6:.0f}",
        f"{model.flop_per_step / 1e12:.1f}",
        model.light.batch,
    )
    return " | ".join(str(column) for column in columns)


def test_a_round_of_cpus_names_no_work() -> None:
    story = Story(("n1", "n2"))
    story.is_in_round()

    assert story.controller.state.round is not None
    assert not story.controller.state.round.record.options
