# SPDX-License-Identifier: Apache-2.0
"""A healthy job: checked, run once, and nobody but the report can tell."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import pytest

from slurm_health.records.nodeset import expand
from tests.lab.installed_site import Record, Report, Site, accused, acts, is_private, kinds, levels

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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One healthy job of alice on four nodes, after its end."""

    site: Site
    job: dict[str, str]
    report: Report
    records: list[Record]
    calls: Counter[str]
    files_before: set[str]
    drained: dict[str, str]


@pytest.fixture(scope="module")
def seen(module_site: Site) -> Seen:
    site = module_site
    site.script("train.sh", TRAIN)
    before = {path.name for path in site.lab.home("alice").iterdir()}
    site.forget_calls()
    site.lab.prefer()  # a busy machine may leave a doubt, which is not what this is about
    number = site.submit("-N4", "train.sh")
    job = site.ended(number)
    site.lab.prefer(usual=True)
    calls = site.calls()
    site.assert_nothing_left()
    return Seen(
        site=site,
        job=job,
        report=site.report(number),
        records=site.records(number),
        calls=calls,
        files_before=before,
        drained=site.drained(),
    )


@pytest.mark.heavy
def test_it_runs_once_where_slurm_put_it_and_ends_with_its_own_code(seen: Seen) -> None:
    fields = ("JobState", "ExitCode", "Restarts", "ExcNodeList")
    assert [seen.job[field] for field in fields] == ["FAILED", "3:0", "0", "(null)"]
    assert seen.site.read("started").count("\n") == 1
    lines = seen.site.read("train.out").splitlines()
    assert lines[0] == "loss 0.1"
    assert sorted(lines[1:]) == [f"step on {node}" for node in NODES]
    assert "a warning" in seen.site.read("train.err").splitlines()
    # Nothing of ours is left in its directory but the journal.
    new = {path.name for path in seen.site.lab.home("alice").iterdir()} - seen.files_before
    assert new == {"started", "train.out", "train.err", ".slurm-health"}
    assert is_private(seen.site.run_directory(seen.job["JobId"]))


def test_the_report_accuses_no_node_and_says_how_the_script_ended(seen: Seen) -> None:
    (attempt,) = seen.report["runs"]
    # Where the host itself takes the processors away for seconds, a doubt is the right answer.
    assert set(levels(attempt)) == set(NODES)
    assert accused(attempt) == {}, attempt["nodes"]
    assert attempt["actions"] == []
    assert attempt["script"]["exit_code"] == 3
    assert "train.sh ended with exit code 3" in seen.site.table(seen.job["JobId"])


def test_slurm_is_asked_for_the_one_step_of_the_check_and_for_nothing_else(seen: Seen) -> None:
    # The step of the script is the second; it fails, and in a third the other nodes tell why.
    assert seen.calls["REQUEST_JOB_STEP_CREATE"] == 3
    assert seen.calls["REQUEST_SUBMIT_BATCH_JOB"] == 1
    assert not {name for name in seen.calls if "UPDATE" in name or "REQUEUE" in name}
    # Those at jobs are this test's own.
    assert looks(seen.calls) == {"REQUEST_NODE_INFO": 1}, "the post-mortem of a script that fails"
    assert (seen.drained, acts(seen.records)) == ({}, [])
    assert kinds(seen.records)["agents_launched"] == 1
    for node in NODES:
        assert kinds(seen.site.records(seen.job["JobId"], writer=node))["workers_ready"] == 1


@pytest.mark.heavy
def test_a_job_whose_script_ends_well_asks_slurm_for_no_node(seen: Seen) -> None:
    seen.site.forget_calls()
    assert seen.site.ended(seen.site.submit("-N2", "--wrap=true"))["JobState"] == "COMPLETED"
    assert looks(seen.site.calls()) == {}


def looks(calls: Counter[str]) -> dict[str, int]:
    """Return every look at nodes or at the configuration."""
    kinds = ("REQUEST_NODE_INFO", "REQUEST_NODE_INFO_SINGLE", "REQUEST_BUILD_INFO")
    return {kind: calls[kind] for kind in kinds if calls[kind]}


def test_the_job_s_output_tells_how_long_each_round_took_each_node(seen: Seen) -> None:
    rounds = re.findall(
        r"^slurm-health: (?:solo test|round \d+): elapsed (.+)$", seen.site.read("train.err"), re.M
    )
    figures = [re.findall(r"(?:^|, )(\S+) \d+\.\d s", line) for line in rounds]
    assert len(rounds) == kinds(seen.records)["round_ended"]
    assert [set(expand(",".join(lists))) for lists in figures] == [set(NODES)] * len(rounds)
