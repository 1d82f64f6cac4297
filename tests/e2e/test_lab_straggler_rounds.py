# SPDX-License-Identifier: Apache-2.0
"""Training steps find a straggler, by each command that offers them.

The lab comes before all else that the machine does, so that what is slow here is what is made slow.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.lab.installed_site import (
    COMMAND,
    Report,
    Site,
    levels,
    verdict_of,
)
from tests.played_gpu.description import Device

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
]

BAD = {"faulty", "slow"}
NODES = "n[1-4]"
FLAG = "--straggler-detection"
LONGEST_S = 900.0
MOST_CHECKS = 3
# So slow that the CPU that plays it is still faster: its times are the described ones.
GPU = Device(
    memory_bytes=4 << 30, tflops=0.002, memory_gb_per_s=8, link_gb_per_s=0.02, jitter=0.005
)


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=4) as lab:
        lab.prefer()
        yield Site(lab)


@pytest.fixture(scope="module")
def gpu_site(played_python: Path) -> Iterator[Site]:
    visible = (played_python.parents[1], played_python.resolve().parents[1])
    with Lab.start(nodes=4, gpus=1, gpu=GPU, visible=visible) as lab:
        lab.prefer()
        yield Site(lab)


def by_check(site: Site, options: tuple[str, ...], words: tuple[str, ...]) -> int:
    return batch(site, f"{COMMAND} check {FLAG} {' '.join(words)}", options)


def by_sbatch(site: Site, options: tuple[str, ...], words: tuple[str, ...]) -> int:
    stays = ("--on-straggler=report", "--max-requeues=0")
    return site.submit(*options, FLAG, *stays, *words, "--wrap=echo trained")


def by_run(site: Site, options: tuple[str, ...], words: tuple[str, ...]) -> int:
    site.script("train.py", "print('trained')\n")
    run = f"srun {COMMAND} run {FLAG} --nnodes=4 {' '.join(words)} train.py"
    return batch(site, run, options)


def batch(site: Site, command: str, options: tuple[str, ...]) -> int:
    return site.lab.sbatch(f"#!/bin/bash\nexport OMP_NUM_THREADS=1\n{command}\n", *options)


Submit = Callable[[Site, tuple[str, ...], tuple[str, ...]], int]


def found_by(site: Site, command: Submit, *options: str, words: tuple[str, ...] = ()) -> Report:
    """Return the check of a job on four nodes that found n3; none may accuse another node.

    Where a machine is so busy that what its nodes do varies more than n3 does, a check is not sure.
    """
    for _ in range(MOST_CHECKS):
        number = command(site, ("-N4", f"--nodelist={NODES}", *options), words)
        site.ended(number, LONGEST_S)
        run: Report = site.report(number)["runs"][0]
        bad = {node for node, level in levels(run).items() if level in BAD}
        assert bad <= {"n3"}, run
        assert command is by_check or "trained" in site.lab.job_output(number)
        if bad:
            return run
    raise AssertionError(f"{MOST_CHECKS} checks did not find it: {run}")


def assert_slow(run: Report, component: str) -> None:
    found = verdict_of(run, "n3")
    assert (found["level"], found["component"]) == ("slow", component), run


def test_check_finds_a_node_behind_a_slow_link_slow_at_communication(site: Site) -> None:
    site.lab.fault.slow_link("n3", mbit=60)  # beyond that a quick machine ends the round

    assert_slow(found_by(site, by_check), "network")


def test_sbatch_finds_a_node_with_a_fifth_of_a_core_slow_at_arithmetic(site: Site) -> None:
    site.lab.fault.starve_cpu("n3", share=0.2)

    assert_slow(found_by(site, by_sbatch), "compute")


@pytest.mark.played_gpu
def test_run_finds_a_node_whose_gpu_is_throttled_slow_at_arithmetic(
    gpu_site: Site, played_python: Path
) -> None:
    gpu_site.lab.fault.gpu_hot("n3", share=0.5)
    try:
        run = found_by(gpu_site, by_run, "--gres=gpu:1", words=(f"--python={played_python}",))
    finally:
        gpu_site.lab.reset()

    assert_slow(run, "compute")
