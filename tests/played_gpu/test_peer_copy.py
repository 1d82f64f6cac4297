# SPDX-License-Identifier: Apache-2.0
"""What devices of a node exchange two by two: how fast, and whether it arrives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.played_gpu.description import Fault, machine, strike, write
from tests.played_gpu.test_checks import BAD, DEVICE, check, levels

pytestmark = [pytest.mark.played_gpu, pytest.mark.timeout(600)]
DEVICES = 9  # three on each of three nodes
WELL = {"local0": "healthy", "local2": "healthy"}


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    write(tmp_path / "gpus", machine(DEVICES, DEVICE, seed=str(tmp_path)))
    return tmp_path / "gpus"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "level", "said"),
    [
        (
            Fault(device=4, kind="link_slow", value=0.005),
            "slow",
            "peer_copy:device 1 ",
        ),
        (
            Fault(device=4, kind="link_flip", value=1),
            "faulty",
            " to device 1: ",
        ),
    ],
    ids=["slow", "changes data"],
)
def test_a_device_whose_way_to_its_neighbours_is_bad_is_named_and_no_other(
    played_python: Path, gpus: Path, fault: Fault, level: str, said: str
) -> None:
    strike(gpus, fault)

    code, nodes, everything = check(
        played_python, gpus, "--check=peer_copy", nodes=3, devices=DEVICES
    )

    assert levels(nodes) == {**WELL, "local1": level}, everything
    assert said in nodes["local1"]["reason"]
    assert code == BAD
