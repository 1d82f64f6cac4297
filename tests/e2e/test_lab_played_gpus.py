# SPDX-License-Identifier: Apache-2.0
"""Jobs on nodes with GPUs, from submission to drain: torch, NCCL's process group, NVML, Slurm.

The GPUs are played, and nothing else: what is broken in one of them is described once, and found by
what the job's own check measures there, and by what root's hooks measure again.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.records.nodeset import expand
from tests.e2e.hooks_support import HookedSite, hooked_site
from tests.lab.installed_site import accused, verdict_of

pytestmark = [
    pytest.mark.lab,
    pytest.mark.played_gpu,
    pytest.mark.timeout(600),
]

# A check of three nodes takes less than a minute on two idle cores, which six processes that load
# torch share; this is for a busy machine.
DEADLINE_S = 400.0
RAN = "echo ran on $SLURM_JOB_NODELIST with GPUs $CUDA_VISIBLE_DEVICES"
# Root's own look at a node that a job accuses. Before the job it would find the fault first.
RETEST = """\
[checks.gpu]
count = 2
nvlinks = 18
contexts = ["retest"]
[checks.xid]
contexts = ["retest"]
"""


@pytest.fixture(scope="module")
def module_site(
    tmp_path_factory: pytest.TempPathFactory, played_python: Path
) -> Iterator[HookedSite]:
    directory = tmp_path_factory.mktemp("hooks")
    # Its venv, and what that was made of, which may be in somebody's home.
    visible = (played_python.parents[1], played_python.resolve().parents[1])
    with hooked_site(directory, nodes=4, gpus=2, visible=visible) as site:
        yield site


@pytest.fixture
def site(module_site: HookedSite) -> Iterator[HookedSite]:
    # The lab's nodes share process numbers: the epilog of one may see those of another's job.
    module_site.configure(RETEST, share=0.5)
    yield module_site
    module_site.lab.reset()
    module_site.configure()


def test_a_dead_gpu_costs_a_requeue_and_its_node_is_drained_once_root_has_seen_it(
    site: HookedSite, played_python: Path
) -> None:
    site.lab.fault.gpu_dead("n2", 1)
    options = ("--gres=gpu:2", f"--python={played_python}", "--open-mode=append")
    job = site.submit(*options, "-N3", "--check=matmul", "--wrap", RAN)
    record = site.ended(job, DEADLINE_S)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["Restarts"] == "1"
    assert expand(record["NodeList"]) == ("n1", "n3", "n4")
    run = site.report(job)["runs"][0]
    assert accused(run) == {"n2": "faulty"}
    assert devices_named(site, verdict_of(run, "n2")["reason"]) == [1]
    drained = site.lab.wait_until(
        site.out_of_pool, lambda nodes: [*nodes] == ["n2"], "a drain", 120
    )
    assert "check=gpu,xid" in drained["n2"]
    assert devices_named(site, drained["n2"]) == [1]


def devices_named(site: HookedSite, text: str) -> list[int]:
    """Return the GPUs of n2 of which a text speaks."""
    names = [
        (device.uuid, device.pci_address.rpartition(".")[0])
        for device in site.lab.fault.gpus_of("n2").devices
    ]
    return [
        index
        for index, of_device in enumerate(names)
        if re.search(rf"\b(device|GPU) {index}\b", text) or any(n in text for n in of_device)
    ]
