# SPDX-License-Identifier: Apache-2.0
"""Jobs on nodes with GPUs, from submission to drain: torch, NCCL's process group, NVML, Slurm.

The GPUs are played, and nothing else: what is broken in one of them is described once, and found by
what the job's own check measures there, and by what root's hooks measure again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
Submit = Callable[..., int]
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


@pytest.fixture
def submit(site: HookedSite, played_python: Path) -> Submit:
    options = ("--gres=gpu:2", f"--python={played_python}", "--open-mode=append")

    def submitted(*words: str) -> int:
        return site.submit(*options, *words, "--wrap", RAN)

    return submitted


def first_check(site: HookedSite, job: int) -> dict[str, Any]:
    run: dict[str, Any] = site.report(job)["runs"][0]
    return run


def names_device(site: HookedSite, node: str, device: int, text: str) -> bool:
    """Whether a text says which GPU of a node it speaks of, and of no other."""

    def is_named(index: int) -> bool:
        each = site.lab.fault.gpus_of(node).devices[index]
        names = (each.uuid, each.pci_address.rpartition(".")[0])
        return re.search(rf"\b(device|GPU) {index}\b", text) is not None or any(
            name in text for name in names
        )

    return [index for index in range(site.lab.spec.gpus) if is_named(index)] == [device]


def await_drained(site: HookedSite, *nodes: str) -> dict[str, str]:
    """Wait until exactly these nodes are out of the pool; their notes."""
    return site.lab.wait_until(
        site.out_of_pool, lambda seen: sorted(seen) == sorted(nodes), f"{nodes} drained", 120
    )


def test_a_dead_gpu_costs_a_requeue_and_its_node_is_drained_once_root_has_seen_it(
    site: HookedSite,
    submit: Submit,
) -> None:
    site.lab.fault.gpu_dead("n2", 1)
    job = submit("-N3", "--check=matmul")
    record = site.ended(job, DEADLINE_S)
    assert record["JobState"] == "COMPLETED", site.read(f"slurm-{job}.out")
    assert record["Restarts"] == "1"
    assert expand(record["NodeList"]) == ("n1", "n3", "n4")
    run = first_check(site, job)
    assert accused(run) == {"n2": "faulty"}
    assert names_device(site, "n2", 1, verdict_of(run, "n2")["reason"])
    note = await_drained(site, "n2")["n2"]
    assert "check=gpu,xid" in note
    assert names_device(site, "n2", 1, note)
