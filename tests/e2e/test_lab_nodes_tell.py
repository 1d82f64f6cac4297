# SPDX-License-Identifier: Apache-2.0
"""After a failure, the nodes of a job report how they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit
from tests.played_gpu import nvml_library
from tests.training.monitor.test_flight_dumps import dump

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(400),
    pytest.mark.skipif(nvml_library.missing() is not None, reason=str(nvml_library.missing())),
]

# Fails once a file is there, in a step of all nodes; who calls it is none of its business.
SCRIPT = """#!/bin/bash
echo begun
srun bash -c 'until [ -e go ]; do sleep 0.2; done; echo "rank $SLURM_PROCID fails" >&2; exit 3'
"""
LOST = "GPU has fallen off the bus"


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """Three nodes, each with a played GPU and the log of a kernel of its own."""
    with Lab.start(nodes=3, gpus=1) as lab:
        yield Site(lab)


@pytest.fixture
def site(module_site: Site) -> Iterator[Site]:
    play(module_site)
    module_site.script("train.sh", SCRIPT)
    (module_site.lab.home("alice") / "go").unlink(missing_ok=True)
    yield module_site
    module_site.lab.reset()


def fails_after(
    site: Site, happens: Callable[[], object] = lambda: None
) -> tuple[int, dict[str, Any]]:
    """Submit the script on all nodes, have something happen, let it fail.

    Returns the job, and what its post-mortem found. Where all processors are taken for long, a node
    or one of its looks may answer too late, which the post-mortem says: then once more.
    """
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


@pytest.mark.heavy
def test_an_xid_on_a_node_that_is_not_the_batch_host_is_the_cause_that_the_post_mortem_names(
    site: Site,
) -> None:
    number, found = fails_after(site, lambda: site.lab.fault.gpu_vanish("n3", 0))

    assert (found["cause"], found["attribution"]) == ("gpu-broken", "node fault"), found
    assert found["accused"] == ["n3"]
    assert any(line.startswith("n3: kernel: NVRM: Xid") and LOST in line for line in found["told"])
    text = site.read(f"out-{number}.txt")
    assert "slurm-health:   nodes     n3: " in text
    assert "slurm-health:   at fault  n3" in text


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_named_and_the_others_tell(site: Site) -> None:
    def breaks() -> None:
        site.lab.fault.gpu_vanish("n2", 0)
        site.lab.fault.kill_slurmd("n3")

    _, found = fails_after(site, breaks)

    assert found["told"][0].startswith("n3 did not answer: srun: error: "), found["told"]
    assert found["cause"] == "gpu-broken"
    assert found["accused"] == ["n2"]


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


def test_all_tasks_of_a_step_on_a_node_are_ranks(site: Site) -> None:
    tasks = "#!/bin/sh\nsrun --ntasks=3 --overcommit sleep 600"
    job = site.lab.sbatch(tasks, "--nodes=1", "--nodelist=n1", "--output=/dev/null")
    look = "import sys; from slurm_health.training.monitor.ranks import Ranks\n"
    look += "ranks = Ranks(sys.argv[1], 'n1'); ranks.find()\n"
    look += "print([sample.rank for sample in ranks.sample()])"
    eventually(site, lambda: len(site.processes_with("600")) >= 4, "srun and its tasks", 60)

    found = site.lab.run([sys.executable, "-c", look, str(job)], user="alice", node="n1")

    assert found.stdout == "[0, 1, 2]\n"
    site.lab.run(["scancel", str(job)], user="alice")
    site.ended(job)
