# SPDX-License-Identifier: Apache-2.0
"""`slurm-health run --nnodes=MIN:MAX` after its check: training goes on when a node is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.lab import processes
from tests.lab.installed_site import COMMAND, Site, eventually

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(400),
]

TRAIN = Path(__file__).parents[1] / "support" / "training.py"
BATCH = f"""\
#!/bin/bash
#SBATCH -N4 --ntasks-per-node=1 --output=run-%j.out
export OMP_NUM_THREADS=1
touch ck.hold
srun --kill-on-bad-exit=0 --wait=0 {COMMAND} run --network-check --nnodes=2:4 \\
    --max-restarts=3 --nproc-per-node=1 train.py \\
    --checkpoint=ck.pt --steps=5 --step-s=0.2
"""


def test_training_goes_on_with_fewer_nodes_and_without_those_that_the_check_left_out(
    site: Site,
) -> None:
    site.script("train.py", TRAIN.read_text())
    site.script("elastic.sh", BATCH)
    site.lab.fault.drop("n4")
    job = int(site.lab.run(["sbatch", "--parsable", "elastic.sh"], user="alice").stdout)

    def said() -> str:
        return site.read(f"run-{job}.out")

    eventually(site, lambda: "3 processes begin at 0" in said(), "three nodes training", 200)
    eventually(site, (site.lab.home("alice") / "ck.pt").exists, "a checkpoint", 60)
    for process in processes.on_node(site.lab.pid("n3")):
        if "torch.distributed.run" in process.argv or "train.py" in process.argv:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    eventually(site, lambda: "2 processes begin at" in said(), "two nodes training", 200)
    (site.lab.home("alice") / "ck.hold").unlink()
    site.ended(job)

    assert re.search(r"2 processes begin at [1-9]", said()), said()
    assert "2 processes end at" in said()
    assert "n4 is LEFT OUT: faulty" in said()
    assert "checking n[1-2] before the workers start (restart 1 of 3)" in said()
    assert "UNCHECKED" not in said()


def test_if_the_first_node_is_lost_the_others_meet_again_on_the_next_one(site: Site) -> None:
    site.script("train.py", TRAIN.read_text())
    site.script("elastic.sh", BATCH)
    (site.lab.home("alice") / "ck.pt").unlink(missing_ok=True)
    job = int(site.lab.run(["sbatch", "--parsable", "elastic.sh"], user="alice").stdout)

    def said() -> str:
        return site.read(f"run-{job}.out")

    eventually(site, lambda: "4 processes begin at 0" in said(), "four nodes training", 200)
    eventually(site, (site.lab.home("alice") / "ck.pt").exists, "a checkpoint", 60)
    for process in processes.on_node(site.lab.pid("n1")):
        ours = any("slurm-health" in word or "train.py" in word for word in process.argv)
        if ours and Path(process.argv[0]).name not in ("srun", "bash"):  # the batch script lives
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    eventually(site, lambda: "3 processes begin at" in said(), "three nodes training", 300)
    (site.lab.home("alice") / "ck.hold").unlink()
    site.ended(job)

    assert re.search(r"3 processes begin at [1-9]", said()), said()
    assert "n1 does not answer any more; checking n[2-4] before the workers start" in said()
    assert "3 processes end at" in said()
