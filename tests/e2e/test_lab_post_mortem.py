# SPDX-License-Identifier: Apache-2.0
"""Scripts that fail on the lab: what the job's owner is told, and what the other nodes report."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit
from tests.played_gpu import nvml_library
from tests.support.rows import rows
from tests.training.monitor.test_flight_dumps import dump

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]
TRAINS = (pytest.mark.slow, pytest.mark.torch)
NEEDS_GPUS = pytest.mark.skipif(
    nvml_library.missing() is not None, reason=str(nvml_library.missing())
)

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


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """Three nodes, each with a played GPU and the log of a kernel of its own."""
    with Lab.start(nodes=3, gpus=0 if nvml_library.missing() else 1) as lab:
        yield Site(lab)


@pytest.fixture
def training(site: Site) -> Site:
    site.script("training.py", TRAINING.read_text())
    site.script("train.sh", SCRIPT)
    play(site)
    return site


def began(site: Site, *arguments: str, env: Mapping[str, str] | None = None) -> int:
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
        pytest.param(*row, marks=TRAINS)
        for row in (
            ("torchrun key-error", "same-error-everywhere", "user error", [0, 1]),
            ("kill 1", "killed", "undecided", [1]),
            ("torchrun kill 1", "killed", "undecided", [1]),
            ("memory 1", "host-out-of-memory", "user error", [1]),
        )
    ],
)
def test_what_failed_first_is_named_and_no_node_is_accused(
    training: Site, words: str, cause: str, attribution: str, ranks: list[int]
) -> None:
    diagnosed = found(training, began(training, *words.split()))

    assert (diagnosed["cause"], diagnosed["attribution"]) == (cause, attribution)
    assert diagnosed["ranks"] == ranks
    assert diagnosed["accused"] == []
    assert diagnosed["nodes"] == [f"n{rank + 1}" for rank in ranks]
    assert training.drained() == {}


@pytest.mark.slow
@pytest.mark.torch
def test_a_node_that_slurm_loses_is_the_one_that_is_accused(training: Site) -> None:
    number = began(training, "wait")
    eventually(training, lambda: BEGAN in training.read(f"out-{number}.txt"), "a step", 150)
    training.lab.fault.kill_slurmd("n2")
    # What slurmctld does after SlurmdTimeout.
    training.lab.run(["scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=not responding"])
    diagnosed = found(training, number)

    assert (diagnosed["cause"], diagnosed["attribution"]) == ("node-lost", "node fault")
    assert diagnosed["accused"] == ["n2"]


@pytest.mark.slow
@rows
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


# --- what the other nodes report ------------------------------------------------------------------


# Fails once a file is there, in a step of all nodes; who calls it is none of its business.
WAITS = """#!/bin/bash
echo begun
srun bash -c 'until [ -e go ]; do sleep 0.2; done; echo "rank $SLURM_PROCID fails" >&2; exit 3'
"""
LOST = "GPU has fallen off the bus"


def fails_after(
    site: Site, happens: Callable[[], object] = lambda: None
) -> tuple[int, dict[str, Any]]:
    """Submit train.sh on all nodes, have something happen, let it fail.

    Returns the job, and what its post-mortem found. Where all processors are taken for long, a node
    or one of its looks may answer too late, which the post-mortem says: then once more.
    """
    play(site)
    options = ("-N3", "--ntasks-per-node=1", "--gres=gpu:1", "--check=matmul", "--no-requeue")
    for _ in range(5):
        (site.lab.home("alice") / "go").unlink(missing_ok=True)
        site.lab.reset()
        number = submit(site, *options, "--output=out-%j.txt", "train.sh", script="")
        site.wait_record(number, "script_started", writer="supervisor")
        happens()
        site.script("go", "")
        # The script and its post-mortem are over; a node whose slurmd has died holds up the rest.
        site.lab.wait_job(number, {"FAILED", "COMPLETING"}, 150)
        (run,) = site.report(number)["runs"]
        found: dict[str, Any] = run["post_mortem"] or {}
        parts = [found.get(part) or () for part in ("told", "not_collected", "failed")]
        lines = [line for part in parts for line in part]
        is_late = any("no answer" in line or "not answer within" in line for line in lines)
        if found and not is_late:
            break
    return number, found


@NEEDS_GPUS
@pytest.mark.heavy
def test_an_xid_on_a_node_that_is_not_the_batch_host_is_the_cause_that_the_post_mortem_names(
    site: Site,
) -> None:
    site.script("train.sh", WAITS)
    number, found = fails_after(site, lambda: site.lab.fault.gpu_vanish("n3", 0))

    assert (found["cause"], found["attribution"]) == ("gpu-broken", "node fault"), found
    assert found["accused"] == ["n3"]
    assert any(line.startswith("n3: kernel: NVRM: Xid") and LOST in line for line in found["told"])
    text = site.read(f"out-{number}.txt")
    assert "slurm-health:   nodes     n3: " in text
    assert "slurm-health:   at fault  n3" in text


@NEEDS_GPUS
@pytest.mark.heavy
def test_dumps_that_only_another_node_has_are_read_there(site: Site) -> None:
    site.script("dump", json.dumps(dump("all_reduce")))
    site.script(
        "train.sh",
        "#!/bin/bash\necho begun\nuntil [ -e go ]; do sleep 0.2; done\n"
        "srun -N1 -n1 -w n3 cp dump /tmp/nccl_trace_rank_2\n"
        'echo "[rank2]:[E1124 02:41:16 ProcessGroupNCCL.cpp:9] [Rank 2] Watchdog caught collective'
        ' operation timeout: WorkNCCL(SeqNum=2)" >&2\nexit 3\n',
    )
    _, found = fails_after(site)

    assert not any(line.startswith("flight-recorder") for line in found["not_collected"]), found
