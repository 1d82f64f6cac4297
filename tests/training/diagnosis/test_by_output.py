# SPDX-License-Identifier: Apache-2.0
"""Simulated hours of trainings without a heartbeat: their output, and what their processes do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.training.diagnosis.by_output import Losses, LossIsNone, OutputProgress, StepLines
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.rank_now import RankNow
from slurm_health.training.diagnosis.seen import Standstill
from slurm_health.training.diagnosis.watched import Looked, WatchedPrograms

LOOK_S = 20.0
WINDOW_S = 15.0
RANKS = 4
NODES = [f"n{rank}" for rank in range(RANKS)]


@dataclass
class Job:
    """What a job writes until a time, and the share of a core that its ranks use then."""

    written: Callable[[float, float], str]
    busy: Callable[[float], float] = lambda _: 0.0

    def ranks(self, now_s: float) -> list[RankNow]:
        used_s = sum(self.busy(float(second)) for second in range(int(now_s)))
        return [RankNow("0", rank, 100 + rank, "S", used_s, 0) for rank in range(RANKS)]


Found = tuple[float, Standstill]


def watched_for(job: Job, until_s: float) -> tuple[list[Found], list[float]]:
    """Watch a job; return when it was said to hang, and for how long by when it went on."""
    progress = OutputProgress()
    hangs: list[Found] = []
    over: list[float] = []
    now_s = 1000.0
    while now_s < until_s:
        progress.take("out", job.written(now_s - LOOK_S, now_s), now_s)
        stalled_s = progress.goes_on(now_s)
        over += [] if stalled_s is None else [stalled_s]
        if progress.suspect(now_s):
            judged = judge(progress, job, now_s)
            hangs += [] if isinstance(judged, str) else [(now_s, judged[0])]
        now_s += LOOK_S
    return hangs, over


def judge(
    progress: OutputProgress, job: Job, now_s: float
) -> tuple[Standstill, FlightRecords] | str:
    before = job.ranks(now_s)
    watched = WatchedPrograms(NODES)
    for rank, node in zip(job.ranks(now_s + WINDOW_S), NODES, strict=True):
        watched.hear(node, [rank], now_s + WINDOW_S)
    looked = Looked(before={("0", each.rank): each for each in before}, looks={})
    return progress.judge(watched, looked, NODES, window_s=WINDOW_S, now_s=now_s + WINDOW_S)


def steps_at(times_s: Sequence[float]) -> Callable[[float, float], str]:
    def written(after_s: float, until_s: float) -> str:
        return "".join(
            f"step {number} loss 0.5\n"
            for number, at_s in enumerate(times_s)
            if after_s < at_s <= until_s
        )

    return written


def uneven(
    seed: int, until_s: float, step_s: float, pause_s: float = 0.0, every: int = 100
) -> list[float]:
    dice = random.Random(seed)
    times: list[float] = []
    at_s = 1000.0
    while at_s < until_s:
        pause = pause_s * dice.uniform(0.5, 1.0) if len(times) % every == every - 1 else 0.0
        at_s += step_s * dice.lognormvariate(0.0, 0.5) + pause
        times.append(at_s)
    return times


@pytest.mark.parametrize("step_s", [0.2, 1.0, 7.0, 60.0])
def test_output_that_ends_while_no_process_works_is_a_hang_and_said_once(step_s: float) -> None:
    times = uneven(1, 1000.0 + 100 * step_s + 600.0, step_s)
    end_s = times[-1]
    ((said_s, standstill),), over = watched_for(Job(steps_at(times)), end_s + 7200.0)

    assert 180.0 <= said_s - end_s <= 260.0 + 30 * step_s
    assert standstill.stalled_s >= standstill.allowance_s >= 200.0
    assert standstill.step == len(times) - 1
    assert over == []


def test_a_job_whose_processes_work_is_not_said_to_hang() -> None:
    """It may evaluate, or spin in a collective: that cannot be told from outside."""
    times = uneven(1, 3000.0, 1.0)

    assert watched_for(Job(steps_at(times), busy=lambda _: 0.3), 6000.0) == ([], [])


def test_pauses_that_came_before_are_no_hang() -> None:
    times = uneven(3, 40000.0, 1.0, pause_s=110.0)

    assert watched_for(Job(steps_at(times)), 39000.0)[0] == []


@pytest.mark.parametrize("text", ["", "loading\n", "x" * 5000])
def test_a_job_whose_output_shows_no_steps_is_never_looked_at(text: str) -> None:
    job = Job(lambda after_s, _: text if after_s < 1100 else "")

    assert watched_for(job, 20000.0) == ([], [])


def test_the_first_steps_may_take_half_an_hour() -> None:
    times = [1000.0 + number * 170.0 for number in range(7)]

    assert watched_for(Job(steps_at(times)), times[-1] + 1500.0) == ([], [])


def test_where_no_process_can_be_seen_nothing_is_said() -> None:
    progress = OutputProgress()
    for number in range(400):
        progress.take("out", f"step {number}\n", 1000.0 + number)
    looked = Looked(before={}, looks={})
    now_s = 3000.0

    assert progress.suspect(now_s)
    judged = progress.judge(WatchedPrograms(NODES), looked, NODES, window_s=WINDOW_S, now_s=now_s)
    assert judged == "no process of the training can be seen"
    assert not progress.suspect(now_s + 30.0)


@pytest.mark.heavy
@given(
    seed=st.integers(0, 10**6),
    step_s=st.sampled_from([0.1, 1.0, 3.0, 20.0, 600.0]),
    every=st.integers(20, 400),
)
@settings(max_examples=30, deadline=None)
def test_hours_of_healthy_steps_with_checkpoints_that_are_written_have_no_hang(
    seed: int, step_s: float, every: int
) -> None:
    until_s = 1000.0 + max(6 * 3600.0, 60 * step_s)
    times = uneven(seed, until_s, step_s, pause_s=1200.0, every=every)

    # Whoever writes a checkpoint, or evaluates, can be seen to.
    assert watched_for(Job(steps_at(times), busy=lambda _: 0.2), until_s - 700.0)[0] == []


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
    "ranks five steps apart": lambda n: f"step {n}\nstep {max(0, n - 5)}\n",
    "ranks apart, every tenth step": lambda n: f"step {10 * n}\nstep {max(0, 10 * n - 40)}\n",
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


@pytest.mark.parametrize(("looks", "known"), [(8, False), (9, True)])
def test_a_pace_is_known_after_as_many_looks_as_monitor_md_says(looks: int, known: bool) -> None:
    page = " ".join((Path(__file__).parents[3] / "docs/howto/monitor.md").read_text().split())
    assert "so with its eighth" in page
    assert "such lines came in nine of these looks" in page
    lines, _ = looked_at(
        "".join(f"step {8 * look + n}\n" for n in range(8)) for look in range(looks)
    )

    assert lines.pace.is_young != known


def test_something_that_was_never_written_before_is_progress() -> None:
    lines, now_s = looked_at([*(f"step {n}\n" for n in range(30)), "", "evaluating\n"])

    assert lines.age_s(now_s) == 0


@pytest.mark.parametrize("write", [lambda _: "", lambda n: f"line of words {'x' * n}\n"])
def test_output_that_does_not_count_is_not_watched(write: Callable[[int], str]) -> None:
    lines, now_s = looked_at(write(n) for n in range(60))

    assert (lines.pace.steps, lines.age_s(now_s)) == (0, 0.0)


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
    lines, _ = looked_at(f"loss {draw(dice)}\n" for _ in range(500))

    assert lines.pace.steps < 50


@given(st.lists(st.text(max_size=400), max_size=30))
def test_no_output_whatever_upsets_it(outputs: list[str]) -> None:
    lines, now_s = looked_at(outputs)

    assert lines.age_s(now_s) >= 0
    assert lines.pace.longest_s >= 0


def losses_told(lines: Sequence[str]) -> list[LossIsNone]:
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
        ("1/9 [best_loss=1.2, loss=nan]", "2/9 [best_loss=1.2, loss=nan]"),
        ("step 1 loss=nan, best_loss=1.2", "step 2 loss=nan, best_loss=1.2"),
        ("step 1 lm loss: nan | aux_loss: 1.0", "step 2 lm loss: nan | aux_loss: 1.0"),
        ("step 1 train/loss=nan, val_loss=2.3", "step 2 train/loss=nan, val_loss=2.3"),
        ("step 1 took 3 min loss nan", "step 2 took 3 min loss nan"),
        ("epoch 1 val_loss=nan", "epoch 2 val_loss=nan"),
    ],
)
def test_a_loss_that_is_no_number_at_two_steps_is_told_once_with_both_lines(
    lines: tuple[str, ...],
) -> None:
    (found,) = losses_told([*lines, *(f"step {step} loss nan" for step in range(90, 95))])

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
        # Bars of tqdm sort what they show by its name.
        [f"{n}/1000 [00:0{n}<01:28, best_loss=inf, loss=2.{n}]" for n in range(5)],
        [f"step {n} | min val loss: inf | val_loss: inf | loss: 2.31" for n in range(5)],
        [f"epoch {n} Prev. loss inf" for n in range(5)],
        [f"step {n} aux_loss=nan, loss=2.31, val_loss=nan" for n in range(5)],
    ],
)
def test_a_training_whose_loss_is_a_number_or_of_one_step_is_not_spoken_of(
    lines: list[str],
) -> None:
    assert losses_told(lines) == []


def test_a_bar_that_shows_the_best_loss_before_there_is_one_tells_of_no_nan() -> None:
    bar = "\r 1{n}%|#{n} | 12{n}/1000 [00:12<01:28, best_loss=inf, loss=2.3{n}]"
    text = "".join(bar.format(n=n) for n in range(9)) + "\r"

    assert StepLines().take(text, 1.0) is None
    assert StepLines().take(text.replace(" loss=2.3", " loss=nan, x="), 1.0) is not None
