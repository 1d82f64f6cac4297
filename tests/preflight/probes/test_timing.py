# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import torch

from slurm_health.preflight import expectations
from slurm_health.preflight.probes.context import ProbeContext
from slurm_health.preflight.probes.exchange import CUDA_PLAN
from slurm_health.preflight.probes.sizes import FULL
from slurm_health.preflight.probes.timing import TimingPlan, timed
from slurm_health.preflight.probes.torch_device import TorchDevice

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
