# SPDX-License-Identifier: Apache-2.0
"""The epilog: a user's finding about this node, read as that user, tested, never just believed."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.core.record_lines import encode
from slurm_health.core.records import NodeJudged, Record, RunStarted, VerdictReached
from slurm_health.core.verdict import Level
from slurm_health.hooks import accused, marked
from slurm_health.hooks.accused import JobEnded, Unreadable
from tests.hooks.conftest import Node

UID = os.getuid() or 1
JOB = 7


def started(job: int = JOB, nodes: tuple[str, ...] = ("n3", "n4")) -> RunStarted:
    return RunStarted(
        run_id="r",
        job_id=job,
        attempt=0,
        cluster="lab",
        partition="gpu",
        nodes=list(nodes),
        master_node=nodes[0],
        user="alice",
    )


def judged(node: str = "n3", level: Level = Level.FAULTY, **changes: object) -> NodeJudged:
    base: dict[str, object] = {
        "component": "node",
        "reason": "allgather failed with n4 and n5",
        "evidence": ["round 0 with n4", "round 1 with n5"],
        "probability": 1.0,
    }
    return NodeJudged(node=node, level=level, **{**base, **changes})  # type: ignore[arg-type]


def lines(*records: Record) -> bytes:
    return b"".join(
        encode(each, entry_id=f"master:{number}", time_s=1.0) for number, each in enumerate(records)
    )


def journal(*nodes: NodeJudged, job: int = JOB) -> bytes:
    return lines(started(job), VerdictReached(nodes=list(nodes or (judged(),))))


class Story:
    """Jobs of several users on one node, whose journals accuse it."""

    def __init__(self, node: Node, root: Path) -> None:
        self.node = node
        self.root = root
        root.mkdir()
        root.chmod(0o755)
        (root / "lab").mkdir()
        (root / "lab").chmod(0o755)

    def run_directory(self, job: int = JOB, attempt: str = "0") -> Path:
        return self.root / "lab" / str(job) / attempt

    def write(self, data: bytes, *, job: int = JOB, attempt: str = "0", uid: int = UID) -> Path:
        run = self.run_directory(job, attempt)
        run.mkdir(parents=True, exist_ok=True)
        path = run / "master.jsonl"
        path.write_bytes(data)
        self.own(job, uid)
        return path

    def own(self, job: int, uid: int) -> None:
        if os.getuid() == 0:
            top = self.root / "lab" / str(job)
            for each in (top, *top.rglob("*")):
                os.chown(each, uid, uid, follow_symlinks=False)

    def ended(self, job: int = JOB, uid: int = UID, restarts: str | None = "0") -> bool:
        """Run the epilog of a job."""
        self.node.now_s += 60
        self.node.more = self.more
        extra = {"SLURM_CLUSTER_NAME": "lab"}
        if restarts is not None:
            extra["SLURM_JOB_RESTART_COUNT"] = restarts
        return self.node.epilog(job, uid, **extra)

    policy = "confirm"

    @property
    def more(self) -> str:
        return (
            f"[accusations]\npolicy='{self.policy}'\nmax_bytes=1000000\n"
            "[checks.flag]\ncheck='file'\npath='/broken'\nexists=false\ncontexts=['retest']\n"
        )


@pytest.fixture
def story(node: Node, tmp_path: Path) -> Story:
    found = Story(node, tmp_path / "journals")
    node.journal = str(found.root)
    for each in (tmp_path, *tmp_path.parents):
        if each.stat().st_uid == os.getuid() and not each.stat().st_mode & 0o001:
            each.chmod(each.stat().st_mode | 0o011)
    return found


# --- what an accusation brings about --------------------------------------------------


def test_a_job_without_a_journal_accuses_nobody(story: Story) -> None:
    assert not story.ended()
    assert story.node.said == ""
    assert story.node.slurm.calls() == []


def test_a_truly_bad_node_is_drained_by_an_ordinary_users_finding(story: Story) -> None:
    story.write(journal())
    story.node.break_it()
    assert story.ended()
    assert story.node.state == "IDLE+DRAIN"
    assert "check=" in story.node.reason
    assert "/broken exists" in story.node.reason
    assert f"job={JOB}" in story.node.reason


def test_a_good_node_is_only_marked(story: Story) -> None:
    story.write(journal())
    assert not story.ended()
    assert story.node.state == "IDLE"
    (mark,) = marked.load(story.node.site.breaker, "n3", owner=os.getuid())
    assert (mark.job, mark.uid, mark.component) == (JOB, UID, "node")
    assert story.node.slurm.calls() == []


def test_no_number_of_jobs_of_one_user_drains_a_good_node(story: Story) -> None:
    for job in range(10, 30):
        story.write(journal(job=job), job=job)
        assert not story.ended(job)
    assert story.node.state == "IDLE"


@pytest.mark.root
def test_marks_of_different_users_and_jobs_add_up_to_a_drain(story: Story) -> None:
    answers = []
    for job, uid in ((10, 1), (11, 1), (12, 2)):
        story.write(journal(job=job), job=job, uid=uid)
        answers.append(story.ended(job, uid))
    assert answers == [False, False, True]
    assert "check=marks job=12" in story.node.reason
    assert "accused by 3 jobs of 2 users" in story.node.reason


@pytest.mark.root
def test_a_node_drained_for_marks_comes_back_by_a_persons_hand_only(story: Story) -> None:
    for job, uid in ((10, 1), (11, 1), (12, 2)):
        story.write(journal(job=job), job=job, uid=uid)
        story.ended(job, uid)
    for _ in range(9):
        story.node.now_s += 100
        story.node.healthcheck()
    assert story.node.state == "IDLE+DRAIN"


@pytest.mark.root
def test_old_marks_do_not_count(story: Story) -> None:
    for job, uid in ((10, 1), (11, 1), (12, 2)):
        story.write(journal(job=job), job=job, uid=uid)
        story.node.now_s += 8 * 24 * 3600
        assert not story.ended(job, uid)


def test_one_job_marks_once_however_often_it_starts(story: Story) -> None:
    for attempt in range(4):
        story.write(journal(), attempt=str(attempt))
        story.ended(restarts=str(attempt))
    assert len(marked.load(story.node.site.breaker, "n3", owner=os.getuid())) == 1


def test_a_site_may_ignore_accusations(story: Story) -> None:
    story.policy = "never"
    story.write(journal())
    story.node.break_it()
    assert not story.ended()
    assert "accuses this node" in story.node.said


def test_a_site_that_trusts_its_users_drains_on_strong_evidence(story: Story) -> None:
    story.policy = "evidence"
    story.write(journal(judged(probability=0.5)))
    assert not story.ended()
    story.write(journal(), job=8)
    story.write(journal(job=8), job=8)
    assert story.ended(8)
    assert "check=accused job=8" in story.node.reason


@pytest.mark.parametrize("level", [Level.HEALTHY, Level.INCONCLUSIVE])
def test_only_a_bad_node_is_accused(story: Story, level: Level) -> None:
    story.write(journal(judged(level=level)))
    story.node.break_it()
    assert not story.ended()
    assert story.node.said == ""


def test_a_slow_node_is_tested_and_drained_for_what_the_test_finds(story: Story) -> None:
    story.write(journal(judged(level=Level.SLOW)))
    story.node.break_it()
    assert story.ended()
    assert "calls this node slow" in story.node.said
    assert "check=flag" in story.node.reason


@pytest.mark.parametrize("policy", ["confirm", "evidence"])
def test_a_slow_node_that_passes_the_test_is_not_even_marked(story: Story, policy: str) -> None:
    story.policy = policy
    for job, uid in ((7, 1000), (8, 1001), (9, 1002), (10, 1003)):
        story.write(journal(judged(level=Level.SLOW), job=job), job=job, uid=uid)
        assert not story.ended(job, uid)
    assert marked.load(story.node.site.breaker, "n3", owner=os.getuid()) == ()


def test_among_several_runs_the_one_that_calls_it_faulty_counts(story: Story) -> None:
    story.write(journal(), attempt="0")
    story.write(journal(judged(level=Level.SLOW)), attempt="0-2")
    assert not story.ended()
    assert "marked" in story.node.said


def test_without_the_restart_count_every_attempt_is_looked_at(story: Story) -> None:
    story.write(journal(), attempt="3-2")
    story.node.break_it()
    assert story.ended(restarts=None)


def test_an_attempt_that_was_requeued_is_looked_at_although_slurm_counts_on(story: Story) -> None:
    """In its epilog, Slurm's restart count is the next attempt's already."""
    story.write(journal(), attempt="2")
    story.node.break_it()
    assert not story.ended(restarts="1")
    assert story.ended(restarts="3")


def test_the_epilog_of_two_jobs_at_once_keeps_both_marks(story: Story) -> None:
    from slurm_health.core.marks import Mark

    site = story.node.site
    pids = []
    for job in range(100, 108):
        pid = os.fork()
        if pid == 0:
            mark = Mark(job=job, uid=job, component="node", text="", time_s=1.0)
            try:
                marked.add(site.breaker, "n3", mark, site.marks, owner=os.getuid())
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    found = marked.load(site.breaker, "n3", owner=os.getuid())
    assert {each.job for each in found} == set(range(100, 108))


# --- hostile journals --------------------------------------------------


def accuse_others(story: Story) -> None:
    story.write(lines(started(), VerdictReached(nodes=[judged("n9"), judged("n4")])))


def run_elsewhere(story: Story) -> None:
    story.write(lines(started(nodes=("n8", "n9")), VerdictReached(nodes=[judged()])))


def another_job(story: Story) -> None:
    story.write(lines(started(job=8), VerdictReached(nodes=[judged()])))


def twice(story: Story) -> None:
    story.write(journal(judged(), judged()))


def no_start(story: Story) -> None:
    story.write(lines(VerdictReached(nodes=[judged()])))


def future(story: Story) -> None:
    story.write(journal() + b'{"v":2,"id":"x","time_s":1,"kind":"verdict_reached"}\n')


def not_a_probability(story: Story) -> None:
    data = journal(judged(probability=0.75)).replace(b"0.75", b"1e999")
    story.write(data)


def oversized(story: Story) -> None:
    story.write(journal() + b" " * 1_000_001)


def link(story: Story) -> None:
    path = story.write(journal())
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    story.own(JOB, UID)


def linked_directory(story: Story) -> None:
    run = story.write(journal()).parent
    run.rename(run.with_name("real"))
    run.symlink_to("real")
    story.own(JOB, UID)


def hard_link(story: Story) -> None:
    path = story.write(journal())
    os.link(path, path.with_name("second"))


def fifo(story: Story) -> None:
    path = story.write(b"")
    path.unlink()
    os.mkfifo(path)
    story.own(JOB, UID)


def directory(story: Story) -> None:
    path = story.write(b"")
    path.unlink()
    path.mkdir()
    story.own(JOB, UID)


def device(story: Story) -> None:
    path = story.write(b"")
    path.unlink()
    path.symlink_to("/dev/zero")


def brackets(story: Story) -> None:
    story.write(journal() + b"[" * 900_000 + b"\n" + b'{"v":2}')


HOSTILE = [
    accuse_others,
    run_elsewhere,
    another_job,
    twice,
    no_start,
    future,
    not_a_probability,
    oversized,
    link,
    linked_directory,
    hard_link,
    fifo,
    directory,
    device,
]


@pytest.mark.parametrize("policy", ["confirm", "evidence"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_journal_accuses_nobody(
    story: Story, hostile: Callable[[Story], None], policy: str
) -> None:
    story.policy = policy
    hostile(story)
    story.node.break_it()
    began = time.monotonic()
    assert not story.ended()
    assert time.monotonic() - began < 5
    assert story.node.slurm.calls() == []


def test_a_journal_of_deep_nesting_does_no_harm(story: Story) -> None:
    brackets(story)
    story.ended()


@pytest.mark.root
def test_a_journal_that_belongs_to_another_is_not_read(story: Story) -> None:
    story.write(journal(), uid=2)
    story.node.break_it()
    (story.root / "lab" / str(JOB)).chmod(0o755)
    assert not story.ended()
    assert "is not the user's own" in story.node.said


@pytest.mark.root
def test_root_is_given_up_before_anything_is_opened(story: Story, tmp_path: Path) -> None:
    """What only root can read stays unread, wherever the user lays it."""
    path = story.write(journal())
    os.chown(path, 0, 0)
    path.chmod(0o600)
    story.node.break_it()
    assert not story.ended()
    assert "not read" in story.node.said


@pytest.mark.root
def test_the_reader_cannot_become_root_again() -> None:
    from slurm_health.hooks.children import Answered, run_one

    def work() -> bytes:
        accused.become(JobEnded(job=1, uid=1, gid=1, cluster="lab", attempt=0))
        try:
            os.setuid(0)
        except PermissionError:
            return str((os.getresuid(), os.getresgid(), os.getgroups())).encode()
        return b"root"

    outcome = run_one(work, 5)
    assert isinstance(outcome, Answered)
    assert outcome.data.startswith(b"((1, 1, 1), (1, 1, 1)")


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_CLUSTER_NAME": "../etc"},
        {"SLURM_CLUSTER_NAME": ""},
        {"SLURM_JOB_ID": "../../x"},
        {"SLURM_JOB_UID": "-1"},
    ],
)
def test_a_strange_environment_is_no_job(changes: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_CLUSTER_NAME": "lab"}
    assert accused.job_of(environ) is not None
    assert accused.job_of(environ | changes) is None


def test_a_users_text_reaches_log_and_note_tamed(story: Story) -> None:
    story.policy = "evidence"
    evil = 'x"; scontrol update NodeName=n9 State=DRAIN \n\x1b[2J\u202e' + "A" * 10_000
    story.write(journal(judged(reason=evil, component="net\nwork")))
    story.ended()
    assert "\x1b" not in story.node.said + story.node.reason
    assert len(story.node.said.splitlines()) <= 4
    assert story.node.slurm.nodes()["n9"] == ("IDLE", "")


# --- clean-up --------------------------------------------------


@pytest.mark.root
def test_what_the_job_left_running_is_ended_and_nothing_else(node: Node) -> None:
    from slurm_health.checks.check import Place
    from slurm_health.hooks.cleanup import end_leftovers

    def sleeper(job: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "SLURM_JOB_ID": job}
        return subprocess.Popen(["sleep", "600"], env=environ, user=UID, start_new_session=True)

    ours, other = sleeper("4242"), sleeper("4243")
    try:
        place = Place(environ={"SLURM_JOB_ID": "4242", "SLURM_JOB_UID": str(UID)})
        assert end_leftovers(place) == []
        assert ours.wait(5) == -9
        assert other.poll() is None
    finally:
        for each in (ours, other):
            each.kill()
            each.wait()


# --- fuzzing --------------------------------------------------


CASES = int(os.environ.get("ACCUSATION_CASES", "100000"))


def test_no_mutation_of_a_journal_accuses_what_it_should_not() -> None:
    """Whatever comes out is about this node and job."""
    from slurm_health.core.accusation import from_journal

    choice = random.Random(7)
    well = journal(judged("n4"), judged("n3", level=Level.HEALTHY))
    seeds = [well, journal(judged("n9")), journal(job=8), lines(started()), b"", b"\0" * 64]
    for _ in range(CASES):
        data = bytearray(choice.choice(seeds))
        for _ in range(choice.randint(1, 12)):
            _mutate(data, choice)
        found = from_journal(bytes(data), node="n3", job=JOB)
        if found is not None:
            assert (found.node, found.job) == ("n3", JOB)
            assert found.reason.isprintable()
            assert len(found.reason) <= 160
            assert 0 <= found.probability <= 1


def _mutate(data: bytearray, choice: random.Random) -> None:
    at = choice.randint(0, len(data))
    match choice.randint(0, 4):
        case 0:
            data[at:at] = choice.randbytes(choice.randint(1, 9))
        case 1:
            del data[at : at + choice.randint(1, 30)]
        case 2 if data:
            data[at % len(data)] = choice.randint(0, 255)
        case 3:
            data[at:at] = data[: choice.randint(0, 200)]
        case _:
            words = (b'"n3"', b'"faulty"', b"7", b"[", b"{", b'"\\ud8"', b"1e999", b"\n")
            data[at:at] = choice.choice(words)


def test_nonsense_from_the_reader_is_refused() -> None:
    ended = JobEnded(job=JOB, uid=UID, gid=UID, cluster="lab", attempt=0)
    choice = random.Random(11)
    for _ in range(500):
        try:
            assert accused._checked(choice.randbytes(choice.randint(0, 80)), ended, "n3") == []
        except Unreadable:
            continue
