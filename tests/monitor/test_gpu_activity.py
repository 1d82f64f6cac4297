# SPDX-License-Identifier: Apache-2.0
"""Which ranks' GPUs compute, as NVML tells it; the driver's library is played."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slurm_health.core.diagnosis.seen import RankSeen
from slurm_health.monitor.gpu_activity import Activity, activity
from tests.checks.test_gpu import build_stub

ASKS = """
import ctypes, sys
from pathlib import Path
import msgspec
from slurm_health.monitor.gpu_activity import activity
ctypes.CDLL(sys.argv[1])  # from now on the library of that name
print(msgspec.json.encode(activity(driver=Path("/dev/null"))).decode())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None or importlib.util.find_spec("pynvml") is None:
        pytest.skip("needs gcc and nvidia-ml-py")
    return build_stub(tmp_path_factory.mktemp("nvml"))


def asked(library: Path, *lines: str) -> Activity:
    state = library.with_name("state")
    state.write_text("\n".join(lines))
    asks = subprocess.run(
        [sys.executable, "-c", ASKS, str(library)],
        env={**os.environ, "STUB_NVML": str(state)},
        capture_output=True,
        check=True,
    )
    return msgspec.json.decode(asks.stdout, type=Activity)


def test_the_busiest_gpu_of_each_process_counts(library: Path) -> None:
    told = ["count=3", "0.process=41", "0.utilization=10", "1.process=41", "1.utilization=97"]

    assert asked(library, *told, "2.process=42").by_pid == {41: 0.97, 42: 0.0}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("init=9", "the NVIDIA driver is not loaded"),
        ("hang=1", "did not answer within 3 s"),
        ("count=2", "no process on a GPU"),
        ("error=15", "NVML: "),
    ],
)
def test_what_the_driver_does_not_tell_has_a_reason(library: Path, told: str, why: str) -> None:
    seen = asked(library, told)

    assert seen.by_pid == {}
    assert why in seen.why_not


def test_a_node_without_a_gpu_is_not_asked(tmp_path: Path) -> None:
    def read() -> bytes:
        raise AssertionError

    assert activity(driver=tmp_path / "none", read=read).why_not == "no NVIDIA GPU on this node"


def test_a_rank_whose_gpu_computes_works() -> None:
    """One that waits for its GPU may sleep meanwhile."""
    assert RankSeen(rank=0, node="n1", gpu_share=0.9).works
    assert not RankSeen(rank=0, node="n1").works
