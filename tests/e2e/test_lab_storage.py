# SPDX-License-Identifier: Apache-2.0
"""A check tells whose fault it is that storage fails: a client's, the server's, the user's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.lab import Lab, storage_faults
from tests.lab.installed_site import Site, eventually
from tests.lab.storage_faults import FAULTS, NODES, SIZE_MB

pytestmark = [
    pytest.mark.lab(network_filesystem=True),
    pytest.mark.slow,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    """A cluster each of whose nodes has its own client of one volume."""
    with Lab.start(nodes=NODES, network_filesystem_mb=SIZE_MB) as lab:
        storage_faults.prepare(lab)
        yield Site(lab)


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_named_and_no_innocent(site: Site, name: str) -> None:
    lab, node = site.lab, "n3"
    fault, level, blame = FAULTS[name]
    with fault(lab, node):
        document = storage_faults.check(lab)
    assert storage_faults.wrong(document, node, level, blame) == ""
    # What the kernel held is freed with its server or client.
    freed_s = storage_faults.FREED_S
    lab.wait_until(lambda: storage_faults.left_over(lab), lambda left: not left, "free", freed_s)
    lab.wait_nodes()


def start(site: Site, *words: str) -> int:
    """Submit a job that says where it ran, after a check of storage."""
    where = storage_faults.directory(site.lab)
    script = ("--wrap", "echo ran on $SLURM_JOB_NODELIST")
    return site.submit("--check=storage", f"--paths={where}", *script, *words)


def test_a_job_leaves_a_node_whose_mount_hangs(site: Site) -> None:
    with storage_faults.hung_client(site.lab, "n3"):
        job = start(site, "-N4", "--spares=1")
        site.lab.wait_until(lambda: site.lab.job_output(job), lambda text: "ran on" in text, "it")
    assert site.ended(job)["JobState"] == "COMPLETED"
    output = site.lab.job_output(job)
    assert "continuing on n[1-2,4-5], without n3: n3: storage" in output
    assert "did not answer within 6 s" in output
    site.assert_nothing_left()
    site.lab.wait_nodes()


@pytest.mark.parametrize("choice", ["proceed", "stop"])
def test_a_job_on_a_server_that_hangs_goes_on_or_stops_as_its_user_wants(
    site: Site, choice: str
) -> None:
    with storage_faults.hung_server(site.lab, "n1"):
        job = start(site, "-N4", f"--on-unchecked={choice}")
        site.wait_record(job, "job_outcome")
    ended = site.ended(job)
    output = site.lab.job_output(job)
    assert ended["JobState"] == ("COMPLETED" if choice == "proceed" else "FAILED")
    assert ("ran on" in output) is (choice == "proceed")
    assert output.count("the server or the way to it is at fault, no node") == 1
    assert site.drained() == {}
    site.assert_nothing_left()
    site.lab.wait_nodes()


TRAINING = """\
import os, sys, time
from slurm_health import heartbeat
with open(f"{sys.argv[1]}/ckpt-{os.environ['SLURM_PROCID']}", "wb", buffering=0) as file:
    for step in range(10**6):
        heartbeat.step(step)
        file.write(b"x")
        os.fsync(file.fileno())
        print("step", step, flush=True)
        time.sleep(0.5)
"""


@pytest.mark.timeout(600)
def test_ranks_that_wait_for_storage_are_named_with_file_server_and_number(site: Site) -> None:
    where = storage_faults.directory(site.lab)
    site.script("save.py", TRAINING)
    options = ("-N3", "--ntasks-per-node=1", "--no-requeue", "--output=saved-%j.txt")
    command = ("--wrap", f"exec srun {sys.executable} save.py {where}")
    job = site.submit("--check=storage", f"--paths={where}", *options, *command)
    output = site.lab.home("alice") / f"saved-{job}.txt"

    def text() -> str:
        return output.read_text() if output.exists() else ""

    eventually(site, lambda: "step 40" in text(), "steps", 200)
    with storage_faults.hung_server(site.lab, "n1"):
        eventually(site, lambda: "waits for storage" in text(), "the reason", 200)
    line = next(line for line in text().splitlines() if "waits for storage" in line)
    assert line.startswith("slurm-health: monitor: paused for ")
    assert f"waits for storage, {where}/ckpt-" in line
    assert line.endswith("as do 2 more")
    eventually(site, lambda: text().count("step ") > 200, "further steps", 200)
    site.lab.run(["scancel", str(job)])
    site.ended(job)
    assert "no step for" not in text()
    site.lab.wait_nodes()
