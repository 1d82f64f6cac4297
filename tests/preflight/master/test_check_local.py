# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local` on a machine with accelerators, which are played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fake_worker.py"
NODES = [f"local{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("devices", "model", "lagging", "slow"),
    [
        # The played products are far below this model's rate.
        pytest.param("0,1,2,3", "NVIDIA H200", [], NODES, id="a device of its own"),
        pytest.param("0", "NVIDIA H200", [], [], id="a device that others use"),
        pytest.param("0,1,2,3", "another", ["local1"], ["local1"], id="one lags on its own"),
        pytest.param("0", "another", ["local1"], [], id="one may have got less of it"),
    ],
)
def test_only_a_device_of_ones_own_is_held_to_its_model_and_to_its_peers(
    tmp_path: Path, devices: str, model: str, lagging: list[str], slow: list[str]
) -> None:
    for node in lagging:
        (tmp_path / node).write_text("lagging")
    done = slurm_health(
        "check",
        "--local=4",
        "--check=quick",
        "--json",
        f"--journal={tmp_path / 'journal'}",
        f"--python={FAKE_WORKER}",
        environ={
            "CUDA_VISIBLE_DEVICES": devices,
            "FAKE_WORKER_DIR": str(tmp_path),
            "FAKE_WORKER_MODEL": model,
        },
    )

    levels = {node["node"]: node["level"] for node in json.loads(done.stdout)["nodes"]}
    assert levels == {node: "slow" if node in slow else "healthy" for node in NODES}
