# SPDX-License-Identifier: Apache-2.0
"""Which jobs a site's rules name, as slurmctld sees them: GPUs, accounts, partitions, time."""

from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site, check_by_default
from tests.lab.played_nodes import FAKE_WORKER, play
from tests.support.rows import rows

pytestmark = [pytest.mark.lab(accounting=True), pytest.mark.timeout(300)]

# Any file can be a device, as Slurm counts them.
GPUS = "Name=gpu Count=2 File=/dev/null,/dev/zero\n"
SLURM_CONF = """\
GresTypes=gpu
NodeName=DEFAULT Gres=gpu:2
PartitionName=DEFAULT Nodes=ALL State=UP
PartitionName=other MaxTime=INFINITE
PartitionName=short DefaultTime=5 MaxTime=INFINITE
PartitionName=long DefaultTime=60 MaxTime=INFINITE
"""
RULES = """[default]
min_nodes = 1
gpus = true
partitions = ["main", "short", "long"]
accounts = ["science"]
min_time_min = 10
opt_out = "nocheck"
"""


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster with two accounts, four partitions and GPUs, and rules that name some of them."""
    with Lab.start(nodes=2, accounting=True, gres_conf=GPUS, slurm_conf_extra=SLURM_CONF) as lab:
        site = Site(lab)
        for words in (
            ("account", "science"),
            ("account", "teaching"),
            ("user", "alice", "account=science"),
            ("user", "alice", "account=teaching"),
        ):
            lab.run(["sacctmgr", "--immediate", "add", *words])
        lab.run(["sacctmgr", "-i", "modify", "user", "alice", "set", "DefaultAccount=science"])
        check_by_default(site, RULES)
        play(site)
        yield site


def sbatch(site: Site, *words: str) -> str:
    played = {
        "SLURM_HEALTH_PYTHON": str(FAKE_WORKER),
        "FAKE_WORKER_DIR": site.directory("played"),
    }
    argv = ["sbatch", "--parsable", *words, "--wrap=echo ran"]
    return site.lab.run(argv, user="alice", env=played).stdout.strip()


def has_launcher(site: Site, *words: str) -> bool:
    job = sbatch(site, "--hold", *words)
    script = site.lab.run(["scontrol", "write", "batch_script", job, "-"]).stdout
    site.lab.run(["scancel", job])
    assert script.endswith("\necho ran\n")
    return "slurm_health" in script


def is_checked(site: Site, *words: str) -> bool:
    job = sbatch(site, *words)
    assert site.ended(job)["JobState"] == "COMPLETED"
    assert site.read(f"slurm-{job}.out") == "ran\n"
    directory = site.lab.home("alice") / ".slurm-health" / "journal" / "lab" / job
    return directory.exists()


@rows
def test_a_job_that_all_rules_name_is_given_the_launcher(
    site: Site, asked: str, is_named: bool
) -> None:
    assert has_launcher(site, *asked.split()) is is_named


@pytest.mark.heavy
def test_where_a_job_starts_its_account_and_its_partition_are_known(site: Site) -> None:
    """Of several partitions Slurm chooses; an account that nobody named is the user's default."""
    assert is_checked(site, "--gpus=1")
    site.lab.run(["scontrol", "update", "partitionname=main", "state=down"])
    try:
        assert not is_checked(site, "--gpus=1", "--partition=other,main")
    finally:
        site.lab.run(["scontrol", "update", "partitionname=main", "state=up"])
    set_default = ["sacctmgr", "-i", "modify", "user", "alice", "set"]
    site.lab.run([*set_default, "DefaultAccount=teaching"])
    try:
        assert not is_checked(site, "--gpus=1")
    finally:
        site.lab.run([*set_default, "DefaultAccount=science"])
