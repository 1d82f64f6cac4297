# SPDX-License-Identifier: Apache-2.0
"""A healthy job: checked, run once, and only the report can tell."""

import re
from collections import Counter

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Site, accused, acts, kinds, levels

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(300),  # a check takes seconds, on a machine that is busy a minute
]

TRAIN = """#!/bin/bash
#SBATCH --output=train.out
#SBATCH --error=train.err
date +%s.%N >> started
echo "loss 0.1"
srun sh -c 'echo step on $(uname -n)'
echo "a warning" >&2
exit 3
"""
NODES = ("n1", "n2", "n3", "n4")


@pytest.mark.heavy
def test_it_runs_once_where_slurm_put_it_and_ends_with_its_own_code(site: Site) -> None:
    site.script("train.sh", TRAIN)
    before = {path.name for path in site.lab.home("alice").iterdir()}
    site.forget_calls()
    site.lab.prefer()  # a busy machine may leave a doubt, which is not what this is about
    number = site.submit("-N4", "train.sh")
    job = site.ended(number)
    site.lab.prefer(usual=True)
    calls = site.calls()
    site.assert_nothing_left()

    fields = ("JobState", "ExitCode", "Restarts", "ExcNodeList")
    assert [job[field] for field in fields] == ["FAILED", "3:0", "0", "(null)"]
    assert site.read("started").count("\n") == 1
    lines = site.read("train.out").splitlines()
    assert lines[0] == "loss 0.1"
    assert sorted(lines[1:]) == [f"step on {node}" for node in NODES]
    assert "a warning" in site.read("train.err").splitlines()
    # Nothing of ours is left in its directory but the journal.
    new = {path.name for path in site.lab.home("alice").iterdir()} - before
    assert new == {"started", "train.out", "train.err", ".slurm-health"}
    assert not site.run_directory(number).stat().st_mode & 0o077  # others cannot read it

    # The report accuses no node, and says how the script ended.
    (attempt,) = site.report(number)["runs"]
    assert set(levels(attempt)) == set(NODES)
    assert accused(attempt) == {}, attempt["nodes"]
    assert (attempt["actions"], attempt["script"]["exit_code"]) == ([], 3)
    assert "train.sh ended with exit code 3" in site.table(number)

    # Slurm is asked for the one step of the check; the step of the script is the second; it fails,
    # and in a third the other nodes tell why.
    assert calls["REQUEST_JOB_STEP_CREATE"] == 3
    assert calls["REQUEST_SUBMIT_BATCH_JOB"] == 1
    assert not {name for name in calls if "UPDATE" in name or "REQUEUE" in name}
    assert looks(calls) == {"REQUEST_NODE_INFO": 1}, "the post-mortem of a script that fails"
    records = site.records(number)
    assert (site.drained(), acts(records)) == ({}, [])
    assert kinds(records)["agents_launched"] == 1
    for node in NODES:
        assert kinds(site.records(number, writer=node))["workers_ready"] == 1

    # The job's output tells how long each round took each node.
    rounds = re.findall(
        r"^slurm-health: (?:solo test|round \d+): elapsed (.+)$", site.read("train.err"), re.M
    )
    figures = [re.findall(r"(?:^|, )(\S+) \d+\.\d s", line) for line in rounds]
    assert len(rounds) == kinds(records)["round_ended"]
    assert [set(expand(",".join(lists))) for lists in figures] == [set(NODES)] * len(rounds)


@pytest.mark.heavy
def test_a_job_whose_script_ends_well_asks_slurm_for_no_node(site: Site) -> None:
    site.forget_calls()
    assert site.ended(site.submit("-N2", "--wrap=true"))["JobState"] == "COMPLETED"
    assert looks(site.calls()) == {}


def looks(calls: Counter[str]) -> dict[str, int]:
    """Return every look at nodes or at the configuration; those at jobs are the test's own."""
    kinds = ("REQUEST_NODE_INFO", "REQUEST_NODE_INFO_SINGLE", "REQUEST_BUILD_INFO")
    return {kind: calls[kind] for kind in kinds if calls[kind]}
