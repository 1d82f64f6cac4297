# SPDX-License-Identifier: Apache-2.0
"""Outputs of trainings as their authors write them, looked at every 20 seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.step_lines import StepLines

LOOK_S = 20.0


def looked_at(outputs: Iterable[str], began_s: float = 1000.0) -> tuple[StepLines, float]:
    """Take in an output a look; return what was learnt, and when the last look was."""
    lines = StepLines()
    now_s = began_s
    for text in outputs:
        now_s += LOOK_S
        lines.take(text, now_s)
    return lines, now_s


FORMS: dict[str, Callable[[int], str]] = {
    "step": lambda n: f"step {n} loss {3 / (n + 1):.4f}\n",
    "iter of": lambda n: f"| epoch {n // 500} | iter {n % 500}/500 | lr 0.1 | ms/batch 12.3\n",
    "timestamp": lambda n: f"2026-11-22 17:{n // 60 % 60:02}:{n % 60:02},027 INFO step {n}\n",
    "tqdm": lambda n: (
        f"\rEpoch 1:  {n // 10:3}%|{'█' * (n // 100)}▏   | {n}/1000"
        f" [{n // 60:02}:{n % 60:02}<01:28, 10.{n % 100:02}it/s, loss=0.{n % 7}]"
    ),
    "ascii bar": lambda n: f"\r{n // 10:3}%|{'#' * (n // 100)}{n % 10}   | {n}/1000 [00:12<01:28]",
    "trainer": lambda n: f"{{'loss': 0.{n * 7919 % 1000}, 'epoch': {n / 100:.2f}}}\n",
    "nemo": lambda n: f"Training epoch {n // 300}, iteration {n}/99999 | lr: 0.0003\n",
    "srun -l": lambda n: f"0: step {n}\n1: step {n}\n2: step {max(0, n - 1)}\n",
    "ranks without a label": lambda n: f"step {n}\nstep {n}\nstep {max(0, n - 1)}\n",
    "colour": lambda n: f"\x1b[32mstep\x1b[0m {n}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_seen_in_output_of_many_forms(form: str) -> None:
    write = FORMS[form]
    lines, now_s = looked_at("".join(map(write, range(20 * n, 20 * n + 20))) for n in range(30))

    assert lines.age_s(now_s) == 0
    assert lines.pace.steps >= 25
    assert lines.pace.typical_s == pytest.approx(LOOK_S)


@pytest.mark.parametrize("form", FORMS)
def test_a_training_whose_output_ends_stands_still_from_then_on(form: str) -> None:
    write = FORMS[form]
    outputs = ["".join(map(write, range(20 * n, 20 * n + 20))) for n in range(30)]
    lines, now_s = looked_at([*outputs, "", "", "", ""])

    assert lines.age_s(now_s) == pytest.approx(4 * LOOK_S)


def test_lines_torn_between_two_looks_are_put_together() -> None:
    text = "".join(f"step {n} loss 0.5\n" for n in range(400))
    lines, now_s = looked_at(text[at : at + 100] for at in range(0, len(text), 100))

    assert lines.age_s(now_s) == 0
    assert lines.line == "step 399 loss 0.5"


@pytest.mark.parametrize(
    "line",
    [
        "still waiting, 2026-11-22 17:10:{0:02}.123\n",
        "GPU memory in use: 12.5 GB\n",
        "waited {0}s for the file system\n",
        "slurm-health: monitor: no line that counts steps for {0} s\n",
        "\rEpoch 1:  12%|#2   | 120/1000 [00:{0:02}<01:28, 10.1it/s]",
    ],
)
def test_what_comes_again_while_a_training_hangs_is_no_progress(line: str) -> None:
    before = [f"step {n}\nGPU memory in use: 12.{n % 7} GB\n" for n in range(30)]
    before.append("step 30\n" + "".join(line.format(n) for n in range(2)))
    lines, began_s = looked_at(before)
    now_s = began_s
    for number in range(10):
        now_s += LOOK_S
        lines.take(line.format(number), now_s)

    assert lines.age_s(now_s) == pytest.approx(10 * LOOK_S)


def test_something_that_was_never_written_before_is_progress() -> None:
    lines, now_s = looked_at([*(f"step {n}\n" for n in range(30)), "", "evaluating\n"])

    assert lines.age_s(now_s) == 0


@pytest.mark.parametrize("write", [lambda _: "", lambda n: f"line of words {'x' * n}\n"])
def test_output_that_does_not_count_is_not_watched(write: Callable[[int], str]) -> None:
    lines, now_s = looked_at(write(n) for n in range(60))

    assert (lines.pace.steps, lines.age_s(now_s)) == (0, 0.0)


def test_numbers_that_come_at_random_have_hardly_a_pace() -> None:
    dice = random.Random(1)
    lines, _ = looked_at(f"loss {dice.random():.4f}\n" for _ in range(500))

    assert lines.pace.steps < 50


@given(st.lists(st.text(max_size=400), max_size=30))
def test_no_output_whatever_upsets_it(outputs: list[str]) -> None:
    lines, now_s = looked_at(outputs)

    assert lines.age_s(now_s) >= 0
    assert lines.pace.longest_s >= 0
