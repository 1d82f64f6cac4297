# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local` on a machine with accelerators, which are played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fake_worker.py"
ONE_EACH, SHARED = "0,1,2,3", "0"


def levels(directory: Path, *, devices: str, model: str) -> set[str]:
    """Check four nodes that were told to behave by files in the directory."""
    done = slurm_health(
        "check",
        "--local=4",
        "--check=quick",
        "--json",
        f"--journal={directory / 'journal'}",
        f"--python={FAKE_WORKER}",
        environ={
            "CUDA_VISIBLE_DEVICES": devices,
            "FAKE_WORKER_DIR": str(directory),
            "FAKE_WORKER_MODEL": model,
        },
    )
    return {f"{node['node']} {node['level']}" for node in json.loads(done.stdout)["nodes"]}


HEALTHY = {f"local{number} healthy" for number in range(4)}
SLOW = {f"local{number} slow" for number in range(4)}


@pytest.mark.parametrize(("devices", "expected"), [(ONE_EACH, SLOW), (SHARED, HEALTHY)])
def test_only_a_device_of_ones_own_is_held_to_what_its_model_reaches(
    tmp_path: Path, devices: str, expected: set[str]
) -> None:
    # The played products are far below this model's rate.
    assert levels(tmp_path, devices=devices, model="NVIDIA H200") == expected


@pytest.mark.parametrize(("devices", "level"), [(ONE_EACH, "slow"), (SHARED, "healthy")])
def test_a_node_that_lags_on_a_shared_device_may_only_have_got_less_of_it(
    tmp_path: Path, devices: str, level: str
) -> None:
    (tmp_path / "local1").write_text("lagging")

    found = levels(tmp_path, devices=devices, model="a device nobody knows")

    assert found == HEALTHY - {"local1 healthy"} | {f"local1 {level}"}
