# SPDX-License-Identifier: Apache-2.0
"""A healthy job: checked, run once, and nobody but the report can tell."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import pytest

from slurm_health.records.nodeset import expand
from tests.lab import played_nodes
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
# Between the end of the check and the first line of the script, on a busy machine.
SLACK_S = 15.0
CHEAP_S = 2.0  # a second round of pairs follows one that took less


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
    assert seen.job["JobState"] == "FAILED"
    assert seen.job["ExitCode"] == "3:0"
    assert seen.job["Restarts"] == "0"
    assert seen.job["ExcNodeList"] == "(null)"
    assert seen.site.read("started").count("\n") == 1


@pytest.mark.heavy
def test_its_standard_output_holds_what_the_script_wrote_and_nothing_else(seen: Seen) -> None:
    lines = seen.site.read("train.out").splitlines()
    assert lines[0] == "loss 0.1"
    assert sorted(lines[1:]) == [f"step on {node}" for node in NODES]
    assert "a warning" in seen.site.read("train.err").splitlines()


def test_nothing_of_ours_is_left_in_its_directory_but_the_private_journal(seen: Seen) -> None:
    home = seen.site.lab.home("alice")
    new = {path.name for path in home.iterdir()} - seen.files_before
    assert new == {"started", "train.out", "train.err", ".slurm-health"}

    assert is_private(seen.site.run_directory(seen.job["JobId"]))


def test_the_report_accuses_no_node_and_says_how_the_script_ended(seen: Seen) -> None:
    (attempt,) = seen.report["runs"]
    # Where the host itself takes the processors away for seconds, a doubt is the right answer.
    assert set(levels(attempt)) == set(NODES)
    assert accused(attempt) == {}, attempt["nodes"]
    assert attempt["actions"] == []
    assert attempt["script"]["exit_code"] == 3
    table = seen.site.table(seen.job["JobId"])
    assert "train.sh ended with exit code 3" in table


def test_nothing_is_done_to_the_cluster(seen: Seen) -> None:
    assert seen.drained == {}
    assert acts(seen.records) == []


def test_slurm_is_asked_for_the_one_step_of_the_check_and_for_nothing_else(seen: Seen) -> None:
    # The step of the script is the second; it fails, and in a third the other nodes tell why.
    assert seen.calls["REQUEST_JOB_STEP_CREATE"] == 3
    assert seen.calls["REQUEST_SUBMIT_BATCH_JOB"] == 1
    changes = {name for name in seen.calls if "UPDATE" in name or "REQUEUE" in name}
    assert changes == set()
    # Those at jobs are this test's own.
    assert looks(seen.calls) == {"REQUEST_NODE_INFO": 1}, "the post-mortem of a script that fails"


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


@pytest.mark.heavy
def test_asked_for_more_at_submission_the_check_says_what_it_waits_for(seen: Seen) -> None:
    words = ["--verbose", "sbatch", "--parsable", "-N2", "--output=more.out", "--wrap=true"]
    submitted = seen.site.health(*words)
    assert submitted.returncode == 0, submitted

    assert seen.site.ended(int(submitted.stdout))["JobState"] == "COMPLETED"
    assert "slurm-health: waiting for " in seen.site.read("more.out")
    assert "waiting for" not in seen.site.read("train.err")


def test_the_agents_are_started_once_and_loaded_once(seen: Seen) -> None:
    assert kinds(seen.records)["agents_launched"] == 1
    job = seen.job["JobId"]
    for node in NODES:
        assert kinds(seen.site.records(job, writer=node))["workers_ready"] == 1


def test_it_starts_as_soon_as_the_check_has_ended(seen: Seen) -> None:
    (verdict,) = [r for r in seen.records if r["kind"] == "verdict_reached"]
    started_s = float(seen.site.read("started"))
    assert started_s - verdict["time_s"] < SLACK_S
    # Slurm tells whole seconds.
    (attempt,) = seen.report["runs"]
    hours, minutes, seconds = seen.job["RunTime"].split(":")
    whole_s = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
    assert whole_s < attempt["duration_s"] + attempt["script"]["duration_s"] + SLACK_S + 1


def first_pairs_s(records: list[Record]) -> float:
    """Return how long the first round of pairs took, by the journal."""
    began = next(r for r in records if r["kind"] == "round_started" and r["phase"] == "pair")
    ended = next(r for r in records if r["kind"] == "round_ended" and r["round"] == began["round"])
    return float(ended["time_s"]) - float(began["time_s"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "pair_rounds", "left_open"),
    [
        (4, 1, "passed with 1 partner; not excluded: an equally slow node in either pair"),
        (6, 1, "passed with 1 partner"),
    ],
)
def test_a_check_in_which_all_is_well_ends_after_as_few_rounds_of_pairs_as_it_can(
    module_site: Site, nodes: int, pair_rounds: int, left_open: str
) -> None:
    site = module_site
    played_nodes.play(site)
    job = played_nodes.submit(site, f"-N{nodes}")

    assert site.ended(job)["JobState"] == "COMPLETED"
    begun = [each["phase"] for each in site.records(job) if each["kind"] == "round_started"]
    if first_pairs_s(site.records(job)) < CHEAP_S:
        pair_rounds = 2
        left_open = "passed with 2 partners"
    assert begun == ["solo", *["pair"] * pair_rounds]
    (attempt,) = site.report(job)["runs"]
    assert {node["reason"] for node in attempt["nodes"]} == {left_open}
