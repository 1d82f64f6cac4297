# SPDX-License-Identifier: Apache-2.0
"""Lines of trainings whose loss is no number, and of those whose loss is one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slurm_health.training.diagnosis.losses import Losses, LossIsNone


def told(lines: Sequence[str]) -> list[LossIsNone]:
    losses = Losses()
    return [each for line in lines if (each := losses.take(line)) is not None]


@pytest.mark.parametrize(
    "lines",
    [
        ("step 0001 | loss = 27.0", "step 0002 | loss = nan", "step 0003 | loss = nan"),
        ("{'loss': nan, 'epoch': 0.01}", "{'loss': nan, 'epoch': 0.02}"),
        (" iteration 20/ 900 | lm loss: NaN |", " iteration 30/ 900 | lm loss: NaN |"),
        ("epoch 3 train_loss=inf", "epoch 4 train_loss=nan"),
        ("1: step 7 loss tensor(nan, device='cuda:0')", "0: step 8 loss tensor(nan)"),
    ],
)
def test_a_loss_that_is_no_number_at_two_steps_is_told_once_with_both_lines(
    lines: tuple[str, ...],
) -> None:
    (found,) = told([*lines, *(f"step {step} loss nan" for step in range(90, 95))])

    assert (found.first, found.line) == (lines[-2].strip(), lines[-1].strip())


@pytest.mark.parametrize(
    "lines",
    [
        # One step, of which each rank tells.
        [f"{rank}: step 7 loss nan" for rank in range(8)],
        # A step that a loss scaler skips.
        ["step 7 loss nan", "step 8 loss 2.1", "step 9 loss nan", "step 10 loss 2.0"],
        ["Gradient overflow. loss = nan, skipping step"] * 5,
        ["loss scale: 65536, step 1", "loss scale: inf, step 2", "loss scale: inf, step 3"],
        ["step 1 loss 1e-30", "step 2 loss 0.0", "step 3 loss infeasible"],
        ["nan values were replaced at step 4", "nan values were replaced at step 5"],
    ],
)
def test_a_training_whose_loss_is_a_number_or_of_one_step_is_not_spoken_of(
    lines: list[str],
) -> None:
    assert told(lines) == []
