# SPDX-License-Identifier: Apache-2.0
"""The epilog: a user's finding about this node, read as that user, tested, never just believed."""

import os
import stat

import pytest

from slurm_health.node.hooks.epilog import reserve_test
from slurm_health.node.marks import MARKS
from slurm_health.records.verdict import Level
from tests.support.accusing import JOB, UID, Story, journal, judged
from tests.support.rows import rows

# --- what an accusation brings about --------------------------------------------------


def test_a_job_without_a_journal_accuses_nobody(story: Story) -> None:
    assert not story.ended()
    assert story.node.said == ""
    assert story.node.slurm.calls() == []


@pytest.mark.root
def test_a_journal_that_its_own_user_cannot_reach_is_told(story: Story) -> None:
    story.write(journal(), uid=1)
    story.root.chmod(0o700)
    assert not story.ended(uid=1)
    place = story.run_directory().parent
    assert f"could not read the job's journal: {place}: Permission denied" in story.node.said


@rows
def test_a_truly_bad_node_is_drained_by_an_ordinary_users_finding(
    story: Story, level: Level, component: str, policy: str, said: str
) -> None:
    story.policy = policy
    story.write(journal(judged(level=level, component=component)))
    story.node.break_it()
    drains = policy == "confirm" and bool(said)
    assert story.ended() is drains
    assert said in story.node.said
    assert said or story.node.said == ""
    assert ("/broken exists check=flag" in story.node.reason) is drains
    assert (f"job={JOB}" in story.node.reason) is drains


class OfPartitions(Story):
    """A site that tests the nodes of one partition, and those of another, each in its own way."""

    @property
    def more(self) -> str:
        tests = "".join(
            f"[checks.{name}]\ncheck='file'\npath='/{name}-broken'\nexists=false\n"
            f"contexts=['retest']\npartitions=['{name}']\n"
            for name in ("gpu", "cpu")
        )
        return super().more + tests


@pytest.mark.parametrize(("partition", "drains"), [("gpu", True), ("cpu", False)])
def test_a_check_of_a_partition_tests_its_jobs(story: Story, partition: str, drains: bool) -> None:
    site = OfPartitions.__new__(OfPartitions)
    site.node, site.root = story.node, story.root
    site.write(journal())
    (story.node.machine / f"{partition}-broken").touch()

    assert site.ended() is drains  # the job's is gpu
    assert ("/gpu-broken exists" in story.node.reason) is drains


def test_a_good_node_is_only_marked(story: Story) -> None:
    story.write(journal())
    assert not story.ended()
    assert story.node.state == "IDLE"
    (mark,) = MARKS.load(story.node.site.breaker)["n3"]
    assert (mark.job, mark.uid, mark.component) == (JOB, UID, "node")
    assert story.node.slurm.calls() == []
    story.write(journal(), attempt="1")  # one job marks once however often it starts
    story.ended(restarts="1")
    assert len(MARKS.load(story.node.site.breaker)["n3"]) == 1


@pytest.mark.root
@pytest.mark.parametrize(("apart_s", "drains"), [(0, True), (8 * 24 * 3600, False)])
def test_marks_of_different_users_drain_a_node(story: Story, apart_s: int, drains: bool) -> None:
    answers = []
    for job, uid in ((10, 1), (11, 1), (12, 2)):
        story.write(journal(job=job), job=job, uid=uid)
        story.node.now_s += apart_s
        answers.append(story.ended(job, uid))
    assert answers == [False, False, drains]
    assert ("check=marks job=12" in story.node.reason) is drains
    assert ("accused by 3 jobs of 2 users" in story.node.reason) is drains
    for _ in range(4):  # only an administrator returns it
        story.node.now_s += 100
        story.node.healthcheck()
    assert (story.node.state == "IDLE+DRAIN") is drains


@pytest.mark.parametrize("restarts", ["3", None])
@pytest.mark.parametrize("run", ["3", "3-2", "3-9", "3-12", "3-1002"])
def test_every_run_of_an_attempt_is_read(story: Story, run: str, restarts: str | None) -> None:
    for other in ("0", "1-7"):
        story.write(journal(judged(level=Level.HEALTHY)), attempt=other)
    story.write(journal(), attempt=run)
    story.node.break_it()
    assert story.ended(restarts=restarts), story.node.said


@pytest.mark.parametrize("slurm_is_asked", [False, True])
@pytest.mark.parametrize(("older_s", "counts"), [(3600, True), (30 * 24 * 3600, False)])
def test_the_journal_of_an_older_job_with_the_same_id_says_nothing(
    story: Story, older_s: int, counts: bool, slurm_is_asked: bool
) -> None:
    """Slurm tells a hook when the job started, or is asked about an accused node."""
    path = story.write(journal())
    os.utime(path, (10**9 - older_s,) * 2)
    story.node.break_it()
    if slurm_is_asked:
        story.node.slurm.started(10**9)
        story.node.now_s = 10**9 + 60.0
        assert story.ended() is counts
    else:
        assert story.ended(SLURM_JOB_START_TIME=str(10**9)) is counts


@pytest.mark.parametrize(
    ("later", "marked"),
    [(Level.SLOW, True), (Level.INCONCLUSIVE, True), (Level.HEALTHY, False)],
)
def test_only_a_healthy_check_takes_it_back(story: Story, later: Level, marked: bool) -> None:
    story.write(journal(), attempt="0")
    story.write(journal(judged(level=later)), attempt="0-2")
    assert not story.ended()
    assert ("marked" in story.node.said) is marked


def test_a_slow_node_that_passes_the_test_is_not_even_marked(story: Story) -> None:
    for job, uid in ((7, 1000), (8, 1001), (9, 1002), (10, 1003)):
        story.write(journal(judged(level=Level.SLOW), job=job), job=job, uid=uid)
        assert not story.ended(job, uid)
    assert MARKS.load(story.node.site.breaker) == {}


def test_an_attempt_that_was_requeued_is_looked_at_although_slurm_counts_on(story: Story) -> None:
    """In its epilog, Slurm's restart count is the next attempt's already."""
    story.write(journal(), attempt="2")
    story.node.break_it()
    assert not story.ended(restarts="1")
    assert story.ended(restarts="3")


def test_one_test_of_a_node_runs_at_a_time_and_one_in_ten_minutes(story: Story) -> None:
    story.write(journal())
    story.node.break_it()
    state = story.node.site.state
    with reserve_test(state, story.node.now_s) as why_not:
        assert why_not == ""
        assert not story.ended()
    assert "not tested: another test of this node is running" in story.node.said
    assert not story.ended()
    assert "not tested: it was tested within 10 min" in story.node.said
    story.node.now_s += 600
    assert story.ended()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (state, *state.iterdir())}
    assert (modes["state"], modes["tested.lock"]) == (0o700, 0o600)
