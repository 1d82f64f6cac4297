# SPDX-License-Identifier: Apache-2.0
"""A journal may hold and be anything: its owner wrote it, and wishes the node or root ill."""

import os
import random
import time
from pathlib import Path

import pytest

from slurm_health.node.hooks import user_journal
from slurm_health.node.hooks.user_journal import JobEnded, Unreadable
from slurm_health.node.rules.accusations import from_journal
from slurm_health.records.errors import RecordTooNew
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level
from slurm_health.system.journal import MASTER, Reader
from tests.support.accusing import JOB, UID, Story, journal, judged, lines, started
from tests.support.rows import rows

HOSTILE_TEXTS = {
    "accuses others": lines(started(), VerdictReached(nodes=[judged("n9"), judged("n4")])),
    "ran elsewhere": lines(started(nodes=("n8", "n9")), VerdictReached(nodes=[judged()])),
    "of another job": lines(started(job=8), VerdictReached(nodes=[judged()])),
    "twice": journal(judged(), judged()),
    "no start": lines(VerdictReached(nodes=[judged()])),
    "of a later version": journal() + b'{"v":2,"id":"x","time_s":1,"kind":"verdict_reached"}\n',
    "no probability": journal(judged(probability=0.75)).replace(b"0.75", b"1e999"),
    "too large": journal() + b" " * (16 << 20),
}


HOSTILE_FILES = "writable, linked, hard linked, a pipe, a directory, a device, in a linked one"


def lay(story: Story, what: str) -> None:
    """Lay down a journal that is no plain file of its owner's alone."""
    path = story.write(journal())
    run = path.parent
    match what:
        case "writable":
            run.parent.chmod(0o777)
        case "hard linked":
            os.link(path, path.with_name("second"))
        case "linked":
            path.rename(path.with_name("real"))
            path.symlink_to("real")
        case "in a linked one":
            run.rename(run.with_name("real"))
            run.symlink_to("real")
        case _:
            path.unlink()
    match what:
        case "a pipe":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
    story.own(JOB, UID)


@pytest.mark.parametrize("hostile", [*HOSTILE_TEXTS, *HOSTILE_FILES.split(", ")])
def test_a_hostile_journal_accuses_nobody(story: Story, hostile: str) -> None:
    if hostile in HOSTILE_TEXTS:
        story.write(HOSTILE_TEXTS[hostile])
    else:
        lay(story, hostile)
    story.node.break_it()
    began = time.monotonic()
    assert not story.ended()
    assert time.monotonic() - began < 60
    assert story.node.slurm.calls() == []


def test_a_journal_of_deep_nesting_does_no_harm(story: Story) -> None:
    story.write(journal() + b"[" * 900_000 + b"\n" + b'{"v":2}')
    story.ended()


@pytest.mark.root
def test_a_journal_that_belongs_to_another_is_not_read(story: Story) -> None:
    story.write(journal(), uid=2)
    story.node.break_it()
    (story.root / "lab" / str(JOB)).chmod(0o755)
    assert not story.ended()
    assert "belongs to user 2, not to user 1" in story.node.said


@pytest.mark.root
def test_root_is_given_up_before_anything_is_opened(story: Story, tmp_path: Path) -> None:
    """What only root can read stays unread, wherever the user lays it."""
    path = story.write(journal())
    os.chown(path, 0, 0)
    path.chmod(0o600)
    story.node.break_it()
    assert not story.ended()
    assert "could not read the job's journal" in story.node.said


@pytest.mark.root
def test_the_reader_cannot_become_root_again() -> None:
    from slurm_health.system.killable import Answered, become, run_one

    def work() -> bytes:
        become(1, 1)
        try:
            os.setuid(0)
        except PermissionError:
            return str((os.getresuid(), os.getresgid(), os.getgroups())).encode()
        return b"root"

    outcome = run_one(work, 5)
    assert isinstance(outcome, Answered)
    assert outcome.data.startswith(b"((1, 1, 1), (1, 1, 1)")


@rows
def test_a_strange_environment_is_no_job(changes: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_CLUSTER_NAME": "lab"}
    assert user_journal.job_of(environ) is not None
    assert user_journal.job_of(environ | changes) is None


def test_a_users_text_reaches_log_and_note_tamed(story: Story) -> None:
    evil = 'x"; scontrol update NodeName=n9 State=DRAIN \n\x1b[2J\u202e' + "A" * 10_000
    story.write(journal(judged(reason=evil, component="net\nwork")))
    story.ended()
    assert "\x1b" not in story.node.said + story.node.reason
    assert len(story.node.said.splitlines()) <= 4
    assert story.node.slurm.nodes()["n9"] == ("IDLE", "")


@pytest.mark.parametrize("form", ["$(touch {})", "`touch {}`", "; touch {} #", "\n touch {}\n"])
def test_nothing_that_a_user_writes_is_executed(story: Story, tmp_path: Path, form: str) -> None:
    made = tmp_path / "made"
    evil = form.format(made)
    story.write(journal(judged(reason=evil, component=evil, evidence=(evil, f"{evil} again"))))
    story.ended()
    node = story.node
    node.break_it()
    said = ("NAME", "COMMENT", "EXTRA", "ACCOUNT", "USER", "WORK_DIR", "STDOUT")
    extra = {f"SLURM_JOB_{name}": evil for name in said}
    node.prolog(7, 1000, **extra)
    assert node.state == "IDLE+DRAIN"
    assert not made.exists()


CASES = int(os.environ.get("ACCUSATION_CASES", "100000"))


def test_no_mutation_of_a_journal_accuses_what_it_should_not(tmp_path: Path) -> None:
    """Whatever comes out is about this node and job."""
    choice = random.Random(7)
    well = journal(judged("n4"), judged("n3", level=Level.HEALTHY))
    seeds = [well, journal(judged("n9")), journal(job=8), lines(started()), b"", b"\0" * 64]
    for _ in range(CASES):
        data = bytearray(choice.choice(seeds))
        for _ in range(choice.randint(1, 12)):
            _mutate(data, choice)
        try:
            entries = Reader(tmp_path, MASTER).take(bytes(data))
        except RecordTooNew:
            continue
        found = from_journal([entry.record for entry in entries], node="n3", job=JOB)
        if found is not None:
            assert (found.node, found.job) == ("n3", JOB)
            assert found.reason.isprintable()
            assert len(found.reason) <= 160


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
        data = choice.randbytes(choice.randint(0, 80))
        try:
            assert user_journal.decode_answer(data, ended, "n3") == []
        except Unreadable:
            continue
