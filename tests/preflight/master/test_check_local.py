# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local` on a machine with accelerators, which are played."""

import json
from pathlib import Path

from tests.support.command_line import slurm_health
from tests.support.rows import rows

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fake_worker.py"
NODES = [f"local{number}" for number in range(4)]


@rows
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
