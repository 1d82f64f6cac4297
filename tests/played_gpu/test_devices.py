# SPDX-License-Identifier: Apache-2.0
"""A played device is what its file describes, and breaks as that says, also while it works."""

from pathlib import Path

import pytest

from tests.played_gpu.description import Device, Fault, machine, strike, write
from tests.played_gpu.running import Ended, run

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
# Slower than any CPU that plays it, so that its times are the described ones.
DEVICE = Device(name="Played GPU of the test", memory_bytes=1 << 30, tflops=0.0002)
PRODUCT_MS = 2 * 128**3 / 0.0002e12 * 1e3
LEAST_MS = 0.999 * PRODUCT_MS  # CUDA tells times with seven digits


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(2, DEVICE, seed=str(tmp_path)))
    return tmp_path / "gpus"


def figures(ended: Ended) -> dict[str, float]:
    assert ended.status == 0, ended.errors
    lines = [line.split() for line in ended.output.splitlines()]
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def work(python: Path, gpus: Path, products: int, **variables: str) -> Ended:
    return run(
        python,
        "device",
        ["1", "60"],
        gpus=gpus,
        variables={"PRODUCTS": str(products), **variables},
    )


def test_a_device_is_as_fast_as_described_and_computes_rightly(
    played_python: Path, gpus: Path
) -> None:
    seen = figures(work(played_python, gpus, 6))
    assert seen["wrong"] == 0
    assert seen["least_ms"] >= LEAST_MS
    assert seen["total"] == 1 << 30


@pytest.mark.parametrize(
    ("code", "said"),
    [(999, "unknown error"), (46, "busy or unavailable"), (802, "system not yet initialized")],
)
def test_a_device_that_does_not_open_says_why(
    played_python: Path, gpus: Path, code: int, said: str
) -> None:
    strike(gpus, Fault(device=1, kind="open_error", value=code))
    ended = work(played_python, gpus, 1)
    assert ended.status == 1
    assert said in ended.errors
    well = run(played_python, "hold", ["0"], gpus=gpus)
    assert well.status == 0, well.errors
