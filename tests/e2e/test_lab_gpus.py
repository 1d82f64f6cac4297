# SPDX-License-Identifier: Apache-2.0
"""Agents see every GPU that the job has on their node, however the job asked for them."""

from collections.abc import Iterator

import pytest

from tests.lab import Lab, played_nodes
from tests.lab.installed_site import Record, Site
from tests.support.rows import rows

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

# Slurm only counts them: any file of a device will do.
DEVICES = ("null", "zero", "full", "random")
GPUS = "".join(f"Name=gpu File=/dev/{each}\n" for each in DEVICES) + "Name=nic Count=2\n"
NODES_WITH_GPUS = "GresTypes=gpu,nic\nNodeName=DEFAULT Gres=gpu:4,nic:2\n"


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster of three nodes with four GPUs each, as far as Slurm can tell."""
    with Lab.start(nodes=3, slurm_conf_extra=NODES_WITH_GPUS, gres_conf=GPUS, cpus=8) as lab:
        yield Site(lab)


def devices(records: list[Record]) -> int:
    (ready,) = [each for each in records if each["kind"] == "workers_ready"][-1:]
    return len(ready["devices"])


@rows
def test_agents_see_every_gpu_of_the_job(site: Site, options: str, expected: list[int]) -> None:
    played_nodes.play(site)
    job = played_nodes.submit(site, "-N2", *options.split(), "--check=matmul")
    assert site.ended(job)["JobState"] == "COMPLETED", site.lab.job_output(job)
    assert [devices(site.records(job, writer=node)) for node in ("n1", "n2")] == expected


def test_an_agent_that_is_started_again_alone_sees_the_gpus_of_its_node(site: Site) -> None:
    played_nodes.play(site)
    site.lab.fault.kill_agent("n2")
    job = played_nodes.submit(site, "-N2", "--gpus=5", "--check=matmul")
    site.ended(job)
    launches = [each for each in site.records(job) if each["kind"] == "agents_launched"]
    assert [each["nodes"] for each in launches] == [["n1", "n2"], ["n2"]]
    assert devices(site.records(job, writer="n2")) == 1


def test_a_node_on_which_fewer_gpus_are_seen_is_not_measured_and_that_is_said(site: Site) -> None:
    played_nodes.play(site)
    # The user's own srun, in front of Slurm's, gives each step one GPU.
    directory = site.directory("one-gpu")
    site.script(
        "one-gpu/srun",
        "#!/bin/bash\nfor word; do shift; [[ $word = --gres=* ]] && word=--gres=gpu:1;"
        ' set -- "$@" "$word"; done\nexec /usr/bin/srun "$@"\n',
    )
    script = f"PATH={directory}:$PATH {played_nodes.command(site)} --check=matmul\n"
    path = site.script("few.sh", f"#!/bin/bash\n{script}")
    job = int(site.lab.run(["sbatch", "--parsable", "-N2", "--gpus=8", path], user="alice").stdout)
    assert site.ended(job)["ExitCode"] == "3:0", site.lab.job_output(job)
    said = site.lab.job_output(job)
    assert "Slurm gave the job 4 GPUs here, 1 of them can be seen" in said
