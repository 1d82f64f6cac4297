# SPDX-License-Identifier: Apache-2.0
"""A DDP training on the lab that fails in one way after another: what the job's owner is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(400),
]

TRAINING = Path(__file__).parents[1] / "support" / "training.py"
# One rank per node; srun starts them, or a torchrun on each node does.
SCRIPT = f"""#!/bin/bash
export OMP_NUM_THREADS=1 MASTER_PORT=$((20000 + SLURM_JOB_ID))
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
if [ "$1" = torchrun ]; then
    shift
    export NODES=$SLURM_NNODES
    exec srun bash -c 'exec {sys.executable} -m torch.distributed.run --nnodes=$NODES \\
        --node-rank=$SLURM_NODEID --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT \\
        --nproc-per-node=1 training.py --timeout-s=20 "$@"' - "$@"
fi
exec srun {sys.executable} training.py --timeout-s=20 "$@"
"""
BEGAN = "step 0"


@pytest.fixture
def training(site: Site) -> Site:
    """The site, with a training in alice's home."""
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    play(site)
    return site


def began(site: Site, *arguments: str, env: Mapping[str, str] | None = None) -> int:
    """Submit the training with these arguments, on two nodes whose check is played."""
    options = ("-N2", "--ntasks-per-node=1", "--output=out-%j.txt", "--no-requeue")
    return submit(site, *options, "train.sh", *arguments, script="", env=env or {})


def found(site: Site, number: int) -> dict[str, Any]:
    """Wait for the end of a job that fails; what its post-mortem found."""
    job = site.ended(number)
    assert job["JobState"] != "COMPLETED"
    (run,) = site.report(number)["runs"]
    assert run["post_mortem"] is not None, site.read(f"out-{number}.txt")
    diagnosed: dict[str, Any] = run["post_mortem"]
    output = site.read(f"out-{number}.txt")
    assert "slurm-health: post-mortem: why train.sh failed" in output
    assert diagnosed["advice"] in output
    assert diagnosed["advice"].split()[0] in site.table(number)
    return diagnosed


@pytest.mark.parametrize(
    ("words", "cause", "attribution", "ranks"),
    [
        ("torchrun key-error", "same-error-everywhere", "user error", [0, 1]),
        ("kill 1", "killed", "undecided", [1]),
        ("torchrun kill 1", "killed", "undecided", [1]),
        ("memory 1", "host-out-of-memory", "user error", [1]),
        ("mismatch 1", "collectives-differ", "user error", [0, 1]),
    ],
)
def test_what_failed_first_is_named_and_no_node_is_accused(
    training: Site, words: str, cause: str, attribution: str, ranks: list[int]
) -> None:
    diagnosed = found(training, began(training, *words.split()))

    assert (diagnosed["cause"], diagnosed["attribution"]) == (cause, attribution)
    assert diagnosed["ranks"] == ranks
    assert diagnosed["accused"] == []
    if cause not in {"collectives-differ"}:
        assert diagnosed["nodes"] == [f"n{rank + 1}" for rank in ranks]
    assert training.drained() == {}


def test_a_node_that_slurm_loses_is_the_one_that_is_accused(training: Site) -> None:
    number = began(training, "wait")
    eventually(training, lambda: BEGAN in training.read(f"out-{number}.txt"), "a step", 150)
    training.lab.fault.kill_slurmd("n2")
    # What slurmctld does after SlurmdTimeout.
    training.lab.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=not responding"])
    diagnosed = found(training, number)

    assert (diagnosed["cause"], diagnosed["attribution"]) == ("node-lost", "node fault")
    assert diagnosed["accused"] == ["n2"]


@pytest.mark.parametrize(
    ("number", "cause", "nodes"),
    [
        (992, "memory-broken", ["n1"]),  # SIG_UME of slurm.h
        (998, "node-lost", []),  # SIG_NODE_FAIL
    ],
)
def test_what_slurm_tells_a_job_of_its_nodes_is_understood(
    training: Site, number: int, cause: str, nodes: list[str]
) -> None:
    """slurmstepd writes its line for a number that no process gets, whoever sends that."""
    site = training
    script = "echo began; until [ -e told ]; do sleep 0.2; done; exit 1"
    job = submit(site, "-N2", "--output=out-%j.txt", script=script)
    output = f"out-{job}.txt"
    eventually(site, lambda: "began" in site.read(output), "the script", 150)
    site.lab.run(["scancel", f"--signal={number}", "--batch", str(job)], user="root")
    eventually(site, lambda: f"*** JOB {job} ON n1" in site.read(output), "Slurm's line", 150)
    site.script("told", "")
    site.ended(job)
    (run,) = site.report(job)["runs"]
    diagnosed = run["post_mortem"]

    assert (diagnosed["cause"], diagnosed["attribution"]) == (cause, "node fault")
    assert (diagnosed["accused"], diagnosed["nodes"]) == (nodes, nodes)
    assert site.drained() == {}
