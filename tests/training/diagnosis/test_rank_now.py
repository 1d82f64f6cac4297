# SPDX-License-Identifier: Apache-2.0
"""Which GPU is a process's own, and whether it works or waits."""

from __future__ import annotations

from slurm_health.training.diagnosis.rank_now import (
    GpuSample,
    GpuUse,
    SampledGpu,
    all_of,
    by_process,
)

GIB = 1 << 30
WAITING = (GpuSample(1.0, 0.0, 130.0),) * 5
IDLE = (GpuSample(0.0, 0.0, 75.0),) * 5
WORKING = (GpuSample(1.0, 0.4, 690.0),) * 5


def gpu(processes: dict[int, int | None], samples: tuple[GpuSample, ...]) -> SampledGpu:
    return SampledGpu(processes=processes, samples=samples, limit_w=700.0)


def test_what_a_watchdog_has_opened_beside_a_ranks_own_gpu_does_not_count() -> None:
    first = gpu({10: 60 * GIB, 11: GIB // 2}, WAITING)
    second = gpu({11: 60 * GIB}, IDLE)

    assert by_process([first, second]) == {10: GpuUse(1.0, waits=True), 11: GpuUse(0.0)}


def test_where_bytes_are_not_told_a_ranks_own_gpu_is_the_one_that_fewest_have_opened() -> None:
    first = gpu({10: None, 11: None}, WAITING)
    second = gpu({11: None}, IDLE)

    assert by_process([first, second])[11] == GpuUse(0.0)


def test_a_process_that_trains_on_two_gpus_works_where_one_of_them_does() -> None:
    two = [gpu({10: 60 * GIB}, WAITING), gpu({10: 50 * GIB}, WORKING)]

    assert by_process(two) == {10: GpuUse(1.0, waits=False)}


def test_a_gpu_that_paused_or_moved_data_in_one_sample_does_not_wait() -> None:
    paused = (*WAITING[:4], GpuSample(0.3, 0.0, 120.0))
    moved = (*WAITING[:4], GpuSample(1.0, 0.05, 130.0))

    assert not gpu({}, paused).waits
    assert not gpu({}, moved).waits


def test_too_few_samples_show_no_waiting() -> None:
    assert not gpu({}, WAITING[:2]).waits


def test_a_rank_whose_children_use_no_gpu_is_as_its_own() -> None:
    assert all_of([GpuUse(1.0, waits=True), GpuUse(0.0)]) == GpuUse(1.0, waits=True)
    assert all_of([]) == GpuUse(0.0)
