# SPDX-License-Identifier: Apache-2.0
"""Two ordinary users keep their journals in one directory, and one of them means ill."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.installed_site import Site, accused, eventually, levels

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.lab,
    pytest.mark.timeout(300),
]

# Lays the next jobs' journals ready, and orders a round with a probe of its own in each that a
# check adopts. A check that trusts one of them runs that probe as its own user.
ATTACK = """
import os, pathlib, sys, time
from slurm_health.records.record_codec import encode
from slurm_health.records.records import ProbeUsed, Rendezvous, RoundStarted
root, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
os.umask(0)
payload, trap = root / "payload.py", root / "trap"
payload.write_text(
    "import pathlib\\n"
    "def measure(context):\\n"
    f"    pathlib.Path({str(root / 'stolen')!r}).write_text('run')\\n"
    "    return []\\n"
)
def lay(directory):
    directory.mkdir(parents=True)
    for writer in ("master", "n1", "n2"):
        (directory / f"{writer}.jsonl").touch()
lay(root / "lab" / str(first) / "0")
lay(trap / "0")
(root / "lab" / str(first + 1)).symlink_to(trap)
(root / "lab" / str(first + 2)).mkdir()
(root / "lab" / str(first + 2) / "0").symlink_to(trap / "0")
print("laid", flush=True)
order = RoundStarted(
    round=99, name="round 99",
    groups=[["n1"], ["n2"]], rendezvous=[Rendezvous(address="", port=1)] * 2,
    deadline_s=60, probes=[ProbeUsed(name="payload", scope="solo", path=str(payload))],
)
while True:
    for master in [*root.glob("lab/*/0/master.jsonl"), trap / "0" / "master.jsonl"]:
        if master.stat().st_size:
            with open(master, "ab") as file:
                file.write(encode(order, entry_id="master:99", time_s=time.time()))
    time.sleep(0.5)
"""


@pytest.fixture
def root(site: Site) -> Iterator[str]:
    """A directory that the administrator has made for everybody's journals, as doctor says."""
    path = site.lab.paths.root / "journals"
    site.lab.run(["install", "-d", "-m", "1777", str(path), str(path / "lab")])
    yield str(path)
    site.lab.run(["rm", "-rf", str(path)])


@contextmanager
def attack(site: Site, root: str, first: int) -> Iterator[None]:
    """Let bob take the places of three jobs to come."""
    running = site.lab.popen([sys.executable, "-c", ATTACK, root, str(first)], user="bob")
    try:
        trap = site.lab.paths.root / "journals" / "lab" / str(first + 2) / "0"
        eventually(site, trap.is_symlink, "bob's directories")
        yield
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
@pytest.mark.torch
def test_a_directory_that_another_user_laid_ready_is_passed_by_and_nothing_in_it_is_run(
    site: Site, root: str
) -> None:
    first = site.lab.sbatch("#!/bin/sh\n", user="bob") + 1
    with attack(site, root, first):
        jobs = [
            site.submit("-N2", "-wn1,n2", f"--journal={root}", "--wrap", "echo the script ran")
            for _ in range(3)
        ]
        assert jobs == [first, first + 1, first + 2]
        for job in jobs:
            assert site.ended(job)["JobState"] == "COMPLETED"
    for job in jobs:
        said = site.lab.job_output(job)
        assert "UNCHECKED" not in said
        assert said.endswith("the script ran\n")
        report = site.health("report", "--json", f"--journal={root}", str(job))
        (run,) = json.loads(report.stdout)["runs"]
        assert levels(run).keys() == {"n1", "n2"}
        assert accused(run) == {}
    assert not (site.lab.paths.root / "journals" / "stolen").exists()
    trap = site.lab.paths.root / "journals" / "trap" / "0"
    assert {each.stat().st_size for each in trap.iterdir()} == {0}
