# SPDX-License-Identifier: Apache-2.0
"""What ranks' GPUs do, as NVML tells it; the driver's library is played."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm_health.training.diagnosis.samples import RankSample
from slurm_health.training.monitor.gpu_activity import (
    GpuActivity,
    GpuSample,
    GpuUse,
    SampledGpu,
    by_process,
    combined,
)
from tests.played_gpu import description, nvml_library
from tests.played_gpu.description import VARIABLE, Fault, Machine, with_faults, write
from tests.support.rows import rows

ASKS = """
import ctypes, sys
from pathlib import Path
import msgspec
from slurm_health.training.monitor.gpu_activity import activity
ctypes.CDLL(sys.argv[1])  # from now on the library of that name
print(msgspec.json.encode(activity(driver=Path("/dev/null"), limit_s=float(sys.argv[2]))).decode())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_library.built(tmp_path_factory)


def machine(count: int) -> Machine:
    """Return GPUs that nobody else plays at the same time."""
    return description.machine(count, seed=f"activity {os.getpid()}")


def asked(
    library: Path, played: Machine, *faults: tuple[int, str, float], limit_s: float = 60.0
) -> GpuActivity:
    state = library.with_name("state")
    broken = [Fault(device=device, kind=kind, value=value) for device, kind, value in faults]
    write(state, with_faults(played, *broken))
    asks = subprocess.run(
        [sys.executable, "-c", ASKS, str(library), str(limit_s)],
        env={**os.environ, VARIABLE: str(state)},
        capture_output=True,
        check=True,
    )
    return msgspec.json.decode(asks.stdout, type=GpuActivity)


USED = [
    *((0, "occupied_by", 41), (0, "utilization", 10)),
    *((1, "occupied_by", 41), (1, "utilization", 97)),
    (2, "occupied_by", 42),
]
WAITS = [(0, "occupied_by", 41), (0, "utilization", 100), (0, "power_w", 130)]


@pytest.mark.parametrize(
    ("faults", "why"), [([], ""), ([(0, "off_bus", 0)], "GPU 0 is lost: GPU is lost")]
)
def test_the_busiest_gpu_of_a_process_counts_and_one_that_is_lost_hides_no_other(
    library: Path, faults: list[tuple[int, str, float]], why: str
) -> None:
    seen = asked(library, machine(3), *USED, *faults)

    assert {pid: use.share for pid, use in seen.by_pid.items()} == {41: 0.97, 42: 0.0}
    assert seen.why_not == why


@rows
def test_a_gpu_that_is_used_without_memory_and_power_waits_if_no_sign_is_missing(
    library: Path, sign: tuple[int, str, float], waits: bool
) -> None:
    others = [fault for fault in WAITS if fault[1] != sign[1]]

    assert asked(library, machine(1), *others, sign).by_pid[41].waits is waits


@rows
def test_what_the_driver_does_not_tell_has_a_reason(
    library: Path, start: int, faults: list[tuple[int, str, float]], why: str
) -> None:
    played = dataclasses.replace(machine(2), nvml_start=start)
    seen = asked(library, played, *faults, limit_s=3.0 if start < 0 else 60.0)

    assert seen.by_pid == {}
    assert why in seen.why_not


@rows
def test_a_rank_works_if_its_gpu_computes_or_it_reads_or_compiles(
    sample: RankSample, works: bool
) -> None:
    assert sample.works is works


WAITING = (GpuSample(1.0, 0.0, 130.0),) * 5


def gpu(processes: dict[int, int | None], samples: tuple[GpuSample, ...]) -> SampledGpu:
    return SampledGpu(processes=processes, samples=samples, limit_w=700.0)


@rows
def test_a_process_is_as_its_own_gpus_are(
    gpus: list[tuple[dict[int, int | None], tuple[GpuSample, ...]]], uses: dict[int, GpuUse]
) -> None:
    assert by_process([gpu(*facts) for facts in gpus]) == uses


@rows
def test_a_gpu_waits_only_if_enough_samples_all_show_it(samples: tuple[GpuSample, ...]) -> None:
    assert gpu({}, WAITING).waits
    assert not gpu({}, samples).waits


def test_a_rank_whose_children_use_no_gpu_is_as_its_own() -> None:
    assert combined([GpuUse(1.0, waits=True), GpuUse(0.0)]) == GpuUse(1.0, waits=True)
    assert combined([]) == GpuUse(0.0)
