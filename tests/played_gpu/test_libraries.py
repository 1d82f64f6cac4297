# SPDX-License-Identifier: Apache-2.0
"""The played libraries are found without PyTorch, are the only ones, and name their own crashes."""

import signal
from pathlib import Path

import pytest

from tests.played_gpu import build
from tests.played_gpu.description import Device, machine, write
from tests.played_gpu.running import CRASHED, run, start

PLAYED = machine(2, Device(name="Played GPU of the test", memory_bytes=1 << 30), seed="libraries")


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", PLAYED)
    return tmp_path / "gpus"


@pytest.mark.played_gpu
@pytest.mark.timeout(600)
def test_the_driver_is_found_without_pytorch_and_no_other_is_loaded(
    played_python: Path, gpus: Path
) -> None:
    ended = run(played_python, "driver", gpus=gpus)
    assert ended.status == 0, ended.errors
    libraries = build.ready(played_python.parents[1])
    assert ended.output.splitlines() == [
        "devices 2",
        "name Played GPU of the test",
        f"uuid {PLAYED.devices[1].uuid.removeprefix('GPU-').replace('-', '')}",
        r"memory b'played\x07\x07'",
        f"total {1 << 30}",
        "freed twice 1",
        f"libraries from {libraries.resolve()}",
    ]


@pytest.mark.played_gpu
@pytest.mark.timeout(600)
def test_a_crash_in_a_played_library_is_named_as_one(played_python: Path, gpus: Path) -> None:
    process = start(played_python, "driver", ["crash"], gpus=gpus).process
    _, errors = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGSEGV
    assert errors.startswith(CRASHED)
    assert "of no device" in errors


def venv_with_torch(directory: Path) -> Path:
    site = directory / "lib/python3.11/site-packages"
    (site / "torch/lib").mkdir(parents=True)
    (site / "torch/lib/libtorch_cuda.so").touch()
    (site / "torch/version.py").write_text("__version__ = '2.13.0'\n")
    return site


def test_nothing_is_played_where_nvidias_own_libraries_are(tmp_path: Path) -> None:
    site = venv_with_torch(tmp_path)
    (site / "nvidia/cu13/lib").mkdir(parents=True)
    with pytest.raises(build.CannotPlay, match="NVIDIA's own libraries"):
        build.ready(tmp_path)
    assert not list(site.glob("played_gpus*"))
