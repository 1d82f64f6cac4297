# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local 4` with torch: what a person sees.

Four agents share this machine, so figures are noisy: a node may be called undecided, or slow
where the machine does other work besides. Nothing here depends on figures.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health

pytestmark = [pytest.mark.torch, pytest.mark.timeout(110)]

FAKE_WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
NODES = ("local0", "local1", "local2", "local3")
# healthy, a slow neighbour on a busy machine, undecided
HONEST = {0, 1, 3}


@pytest.mark.heavy
def test_a_machine_that_is_well_is_checked_and_reported(tmp_path: Path) -> None:
    done = slurm_health(
        "check", "--local=4", f"--journal={tmp_path}", environ={"CUDA_VISIBLE_DEVICES": ""}
    )

    assert done.code in HONEST, done
    (job,) = (path.name for path in (tmp_path / "local").iterdir())
    told = slurm_health("report", job, f"--journal={tmp_path}", "--json")
    report = json.loads(told.stdout)
    nodes = {node["node"]: node for node in report["nodes"]}
    assert set(nodes) == set(NODES)
    assert "faulty" not in {node["level"] for node in nodes.values()}, nodes
    assert all(
        node["figures"]["allgather_gb_per_s"] and node["figures"]["matmul_gflop_per_s"]
        for node in nodes.values()
    )
    assert [run["exit_code"] for run in report["runs"]] == [done.code]
    table = slurm_health("report", job, f"--journal={tmp_path}")
    rows = [line for line in done.stdout.splitlines() if line.startswith("local")]
    assert [row for row in rows[1:] if row not in table.stdout] == []


@pytest.mark.root
def test_a_journal_that_fills_up_ends_the_check_with_a_word_of_it(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(full)], check=True, timeout=10
    )
    try:
        done = slurm_health(
            "check",
            "--local=4",
            f"--journal={full}",
            f"--python={FAKE_WORKER}",
            environ={"FAKE_WORKER_DIR": str(tmp_path)},
        )
    finally:
        subprocess.run(["umount", str(full)], check=True, timeout=10)

    assert done.code == 4
    assert "No space left on device" in done.stderr
    assert "--journal DIR" in done.stderr
