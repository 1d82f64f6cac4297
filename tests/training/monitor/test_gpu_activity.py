# SPDX-License-Identifier: Apache-2.0
"""What ranks' GPUs do, as NVML tells it; the driver's library is played."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm_health.training.diagnosis.samples import Frame, RankSample
from slurm_health.training.monitor.gpu_activity import (
    GpuActivity,
    GpuSample,
    GpuUse,
    SampledGpu,
    activity,
    by_process,
    combined,
)
from tests.played_gpu import description, nvml_library
from tests.played_gpu.description import VARIABLE, Fault, Machine, with_faults, write

ASKS = """
import ctypes, sys
from pathlib import Path
import msgspec
from slurm_health.training.monitor.gpu_activity import activity
ctypes.CDLL(sys.argv[1])  # from now on the library of that name
print(msgspec.json.encode(activity(driver=Path("/dev/null"))).decode())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.built(tmp_path_factory)


def machine(count: int) -> Machine:
    """Return GPUs that nobody else plays at the same time."""
    return description.machine(count, seed=f"activity {os.getpid()}")


def asked(library: Path, played: Machine, *faults: tuple[int, str, float]) -> GpuActivity:
    state = library.with_name("state")
    broken = [Fault(device=device, kind=kind, value=value) for device, kind, value in faults]
    write(state, with_faults(played, *broken))
    asks = subprocess.run(
        [sys.executable, "-c", ASKS, str(library)],
        env={**os.environ, VARIABLE: str(state)},
        capture_output=True,
        check=True,
    )
    return msgspec.json.decode(asks.stdout, type=GpuActivity)


def shares(seen: GpuActivity) -> dict[int, float]:
    return {pid: use.share for pid, use in seen.by_pid.items()}


USED = [
    (0, "occupied_by", 41),
    (0, "utilization", 10),
    (1, "occupied_by", 41),
    (1, "utilization", 97),
    (2, "occupied_by", 42),
]


def test_the_busiest_gpu_of_each_process_counts(library: Path) -> None:
    assert shares(asked(library, machine(3), *USED)) == {41: 0.97, 42: 0.0}


def test_a_gpu_that_is_lost_hides_no_other(library: Path) -> None:
    seen = asked(library, machine(3), *USED, (0, "off_bus", 0))

    assert shares(seen) == {41: 0.97, 42: 0.0}
    assert seen.why_not == "GPU 0 is lost: GPU is lost"


WAITS = [(0, "occupied_by", 41), (0, "utilization", 100), (0, "power_w", 130)]


def test_a_gpu_that_is_used_without_memory_and_power_waits(library: Path) -> None:
    assert asked(library, machine(1), *WAITS).by_pid == {41: GpuUse(1.0, waits=True)}


@pytest.mark.parametrize(
    "sign",
    [
        (0, "utilization", 80),
        (0, "memory_utilization", 12),
        (0, "power_w", 400),
        (0, "power_w", -1),
        (0, "power_limit_mw", -1),
    ],
)
def test_a_gpu_that_lacks_a_sign_of_waiting_works(
    library: Path, sign: tuple[int, str, float]
) -> None:
    others = [each for each in WAITS if each[1] != sign[1]]

    assert not asked(library, machine(1), *others, sign).by_pid[41].waits


@pytest.mark.parametrize(
    ("start", "faults", "why"),
    [
        (9, [], "the NVIDIA driver is not loaded"),
        (-1, [], "did not answer within 3 s"),
        (0, [], "no process on a GPU"),
        (0, [(0, "nvml_error", 15), (1, "nvml_error", 15)], "GPU 1 is lost: GPU is lost"),
        (0, [(1, "nvml_error", 999)], "GPU 1 cannot be asked: Unknown Error"),
    ],
)
def test_what_the_driver_does_not_tell_has_a_reason(
    library: Path, start: int, faults: list[tuple[int, str, float]], why: str
) -> None:
    seen = asked(library, dataclasses.replace(machine(2), nvml_start=start), *faults)

    assert seen.by_pid == {}
    assert why in seen.why_not


def test_a_node_without_a_gpu_is_not_asked(tmp_path: Path) -> None:
    def read() -> bytes:
        raise AssertionError

    assert activity(driver=tmp_path / "none", read=read) == GpuActivity()


def test_a_rank_whose_gpu_computes_works() -> None:
    """One that waits for its GPU may sleep meanwhile."""
    assert RankSample(rank=0, node="n1", gpu_share=0.9).works
    assert not RankSample(rank=0, node="n1").works


def test_a_rank_whose_gpu_waits_may_spin_but_neither_read_nor_compile() -> None:
    waits = RankSample(rank=0, node="n1", gpu_share=1.0, gpu_waits=True, cpu_share=2.0)
    compiles = (Frame("train.py", 3, "main"), Frame("/x/torch/_inductor/compile_fx.py", 9, "run"))

    assert not waits.works
    assert msgspec.structs.replace(waits, moved_bytes=1 << 20).works
    assert msgspec.structs.replace(waits, stack=compiles).works


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
    assert combined([GpuUse(1.0, waits=True), GpuUse(0.0)]) == GpuUse(1.0, waits=True)
    assert combined([]) == GpuUse(0.0)
