# SPDX-License-Identifier: Apache-2.0
"""Lines of output that count steps, and losses that are no numbers any more; time is passed."""

import random
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.training.diagnosis.output_lines import (
    Losses,
    NonFiniteLoss,
    StepLines,
    first_non_finite,
)
from tests.support.rows import rows

DATA = Path(__file__).parents[2] / "data"
LINES = tomllib.loads((DATA / "lines.toml").read_text())
READ_S = 20.0


def read(outputs: Iterable[str], began_s: float = 1000.0) -> tuple[StepLines, float]:
    """Take in an output a reading; return what was learnt, and when the last reading was."""
    lines = StepLines()
    now_s = began_s
    for text in outputs:
        now_s += READ_S
        lines.take(text, now_s)
    return lines, now_s


def age_s(lines: StepLines, now_s: float) -> float:
    return now_s - lines.last_s if lines.line else 0.0


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
    "ranks five steps apart": lambda n: f"step {n}\nstep {max(0, n - 5)}\n",
    "ranks apart, every tenth step": lambda n: f"step {10 * n}\nstep {max(0, 10 * n - 40)}\n",
    "colour": lambda n: f"\x1b[32mstep\x1b[0m {n}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_seen_in_output_of_many_forms_and_that_they_stay_away(form: str) -> None:
    write = FORMS[form]
    outputs = ["".join(map(write, range(20 * n, 20 * n + 20))) for n in range(30)]
    lines, now_s = read(outputs)
    assert age_s(lines, now_s) == 0
    assert lines.intervals >= 25
    assert lines.typical_s == pytest.approx(READ_S)
    lines, now_s = read([*outputs, "", "", "", ""])
    assert age_s(lines, now_s) == pytest.approx(4 * READ_S)


@pytest.mark.parametrize(("line", "names"), LINES["checkpoints"])
def test_a_line_that_names_a_checkpoint_as_written_is_kept(line: str, names: bool) -> None:
    lines, now_s = read(["step 1\n", f"{line}\n", "step 2\n"])

    assert (lines.saved, lines.saved_s) == ((line, now_s - READ_S) if names else ("", 0.0))


def test_lines_torn_between_two_looks_are_put_together() -> None:
    text = "".join(f"step {n} loss 0.5\n" for n in range(400))
    lines, now_s = read(text[at : at + 100] for at in range(0, len(text), 100))

    assert age_s(lines, now_s) == 0
    assert lines.line == "step 399 loss 0.5"


@rows
def test_what_comes_again_while_a_training_hangs_is_no_progress(line: str) -> None:
    before = [f"step {n}\nGPU memory in use: 12.{n % 7} GB\n" for n in range(30)]
    before.append("step 30\n" + "".join(line.format(n) for n in range(2)))
    lines, began_s = read(before)
    now_s = began_s
    for number in range(10):
        now_s += READ_S
        lines.take(line.format(number), now_s)

    assert age_s(lines, now_s) == pytest.approx(10 * READ_S)


def test_something_that_was_never_written_before_is_progress() -> None:
    lines, now_s = read([*(f"step {n}\n" for n in range(30)), "", "evaluating\n"])

    assert age_s(lines, now_s) == 0


@pytest.mark.parametrize("write", [lambda _: "", lambda n: f"line of words {'x' * n}\n"])
def test_output_that_does_not_count_is_not_watched(write: Callable[[int], str]) -> None:
    lines, now_s = read(write(n) for n in range(60))

    assert (lines.intervals, age_s(lines, now_s)) == (0, 0.0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda dice: f"{dice.random():.4f}",
        lambda dice: f"{dice.randint(30_000, 40_000)}",
        lambda dice: f"{dice.randint(40, 48)}",
    ],
)
def test_numbers_that_come_at_random_have_hardly_a_pace(
    draw: Callable[[random.Random], str],
) -> None:
    dice = random.Random(1)
    lines, _ = read(f"loss {draw(dice)}\n" for _ in range(500))

    assert lines.intervals < 50


@given(st.lists(st.text(max_size=400), max_size=30))
def test_no_output_whatever_upsets_it(outputs: list[str]) -> None:
    lines, now_s = read(outputs)

    assert age_s(lines, now_s) >= 0
    assert lines.longest_s >= 0


def test_what_began_before_it_was_read_is_searched_backwards_to_its_first_line() -> None:
    before = [f"step {step} loss 0.{step}" for step in range(20)]
    since = [f"step {step} loss nan" for step in range(20, 161)]
    (known,) = losses_told(since[100:])

    assert known.first == "step 120 loss nan"
    first = first_non_finite(reversed(["", *before, "saved", *since, "step 161 lo"]))
    assert first == "step 20 loss nan"
    assert NonFiniteLoss(first=first, line=known.line).step == 20
    assert first_non_finite(reversed(before)) == ""


@pytest.mark.parametrize(("line", "step"), LINES["steps"])
def test_the_step_at_which_a_loss_is_lost_is_named_where_its_line_names_it(
    line: str, step: int
) -> None:
    assert NonFiniteLoss(first=line, line=line).step == step


def losses_told(lines: Sequence[str]) -> list[NonFiniteLoss]:
    losses = Losses()
    return [each for line in lines if (each := losses.take(line)) is not None]


@pytest.mark.parametrize("lines", LINES["lost_losses"])
def test_a_loss_that_is_no_number_at_two_steps_is_told_once_with_both_lines(
    lines: list[str],
) -> None:
    (loss,) = losses_told([*lines, *(f"step {step} loss nan" for step in range(90, 95))])

    assert (loss.first, loss.line) == (lines[-2].strip(), lines[-1].strip())


@pytest.mark.parametrize("lines", LINES["losses"])
def test_a_training_whose_loss_is_a_number_or_of_one_step_is_not_spoken_of(
    lines: list[str],
) -> None:
    assert losses_told(lines) == []


def test_a_bar_that_shows_the_best_loss_before_there_is_one_tells_of_no_nan() -> None:
    bar = "\r 1{n}%|#{n} | 12{n}/1000 [00:12<01:28, best_loss=inf, loss=2.3{n}]"
    text = "".join(bar.format(n=n) for n in range(9)) + "\r"

    assert StepLines().take(text, 1.0) is None
    assert StepLines().take(text.replace(" loss=2.3", " loss=nan, x="), 1.0) is not None
