# SPDX-License-Identifier: Apache-2.0
"""How long iterations take, and what others took of that."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from slurm_health.preflight import expectations
from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.exchange import CUDA_PLAN
from slurm_health.preflight.probes.sizes import FULL
from slurm_health.preflight.probes.timing import (
    Machine,
    Stopwatch,
    TimedWindow,
    TimingPlan,
    taken_of_s,
    timed,
)
from slurm_health.preflight.probes.torch_device import TorchDevice
from slurm_health.system.killable import Answered, run_one
from tests.support.rows import rows

DEVICE = TorchDevice(torch.device("cpu"))


def test_all_meet_after_the_warm_up_and_before_what_counts() -> None:
    said: list[str] = []
    context = ProbeContext(DEVICE, meet=lambda: said.append("met"))

    timed(
        context, lambda: said.append("ran"), TimingPlan(warm_ups=2, budget_s=0.0, least=3, most=9)
    )

    assert said == ["ran", "ran", "met", "ran", "ran", "ran"]


def test_iterations_that_take_long_are_warmed_up_twice_and_no_more() -> None:
    context = ProbeContext(DEVICE)
    ran: list[str] = []

    def slow() -> None:
        ran.append("slow")
        time.sleep(0.03)

    pace = TimingPlan(warm_ups=5, budget_s=0.0, least=3, most=9, warm_up_s=0.02)

    timed(context, slow, pace)
    timed(context, lambda: ran.append("quick"), pace)

    assert ran == ["slow"] * (2 + 3) + ["quick"] * (5 + 3)


def test_short_iterations_are_timed_for_half_a_second_on_accelerators() -> None:
    begun: list[float] = []
    took_s = [0.002]

    def never_quicker_than_the_warm_up() -> None:
        start = time.perf_counter()
        time.sleep(max(took_s))
        if not begun:
            took_s.append(time.perf_counter() - start)

    context = ProbeContext(DEVICE, meet=lambda: begun.append(time.perf_counter()))

    windows = timed(context, never_quicker_than_the_warm_up, CUDA_PLAN)

    assert time.perf_counter() - begun[0] >= 0.5
    assert len(windows.iteration_ms) <= CUDA_PLAN.most


def test_expectations_are_of_what_the_probes_do() -> None:
    assert FULL.gather_bytes == expectations.ALLGATHER_BYTES_PER_RANK
    assert 2.0 * FULL.matmul_size**3 == expectations.MATMUL_FLOP
    assert 2 * FULL.copy_bytes == expectations.COPY_BYTES


BURNER = f"{sys.executable} -c 'while True: pass' & echo $!; wait"
IDLE = Machine(busy_s=0.0, stolen_s=0.0, own_s=0.0)


@pytest.fixture
def one_processor() -> Iterator[int]:
    """Have this process, and what it starts, on one processor only."""
    usual = os.sched_getaffinity(0)
    chosen = min(usual)
    os.sched_setaffinity(0, {chosen})
    yield chosen
    os.sched_setaffinity(0, usual)


def apart(work: Callable[[], object]) -> Any:
    """Return what work in a process of its own returns: what runs beside this one is not its."""
    answer = run_one(lambda: msgspec.json.encode(work()), 60.0)
    assert isinstance(answer, Answered), answer
    return msgspec.json.decode(answer.data)


def burn_for(time_s: float) -> None:
    end_s = time.perf_counter() + time_s
    while time.perf_counter() < end_s:
        pass


@pytest.fixture
def burner() -> Iterator[None]:
    """Have a process of somebody else's burn: a grandchild, as who was started with us is ours."""
    with subprocess.Popen(["sh", "-c", BURNER], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        yield
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("one_processor", "burner")
def test_what_another_process_takes_of_a_processor_is_left_out() -> None:
    def work() -> list[Any]:
        watch, before_s = Stopwatch(), time.thread_time()
        for _ in range(5):
            watch.begin()
            burn_for(0.1)
            watch.end(1)
        sample = watch.sample()
        return [time.thread_time() - before_s, sum(sample.iteration_ms), sum(sample.taken_ms)]

    ran_s, elapsed_ms, taken_ms = apart(work)

    assert taken_ms >= 0.1 * elapsed_ms
    assert elapsed_ms - taken_ms == pytest.approx(ran_s * 1e3, abs=0.2 * elapsed_ms)


@rows
def test_what_others_took_of_a_window(
    unserved_s: float, ran_s: float, machine_s: tuple[float, float, float], taken_s: float
) -> None:
    window = TimedWindow(elapsed_s=1.0, unserved_s=unserved_s, ran_s=ran_s)
    busy_s, stolen_s, own_s = machine_s

    machine = Machine(busy_s=busy_s, stolen_s=stolen_s, own_s=own_s)
    assert taken_of_s([window], IDLE, machine) == [pytest.approx(taken_s)]
