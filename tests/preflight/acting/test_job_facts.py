# SPDX-License-Identifier: Apache-2.0
"""What is known of a job before anything is done about its nodes."""

from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.acting.job_facts import past, read_facts
from slurm_health.preflight.decide.facts import JobFacts
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.records import Action, ActionIntended, RunStarted
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system.slurm.client import Client
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import RunJournal, run_started, write_requeued_job
from tests.support.rows import rows

JOB = 12


def started(attempt: int, **more: Any) -> RunStarted:
    return run_started(["n1"], attempt=attempt, **more)


def test_requeues_are_counted_from_the_earlier_attempts(tmp_path: Path) -> None:
    first, second = write_requeued_job(tmp_path, job=JOB)
    (first.directory.parent / "2").mkdir()

    assert past(second.directory, started(1), [])[0] == 1
    assert past(first.directory, started(0), [])[0] == 0
    assert past(tmp_path / "nowhere" / "0", started(0), [])[0] == 0


@pytest.mark.parametrize(
    ("older", "newer"),
    [({}, started(0)), ({"submit_time_s": 5}, started(2, submit_time_s=9))],
    ids=["attempts that begin anew", "another time of submission"],
)
def test_requeues_of_an_older_job_with_the_same_id_do_not_count(
    tmp_path: Path, older: dict[str, Any], newer: RunStarted
) -> None:
    intended = ActionIntended(action=Action.REQUEUE, nodes=["n1"])
    run = RunJournal(tmp_path, job=JOB, label="1")
    run.start(**older)
    run.master(intended)

    assert past(run.directory.parent / "0-2", newer, [])[0] == 0
    assert past(run.directory.parent / "2", started(2), [])[0] == 1


def test_a_faulty_node_that_was_given_back_in_this_attempt_is_left_behind(tmp_path: Path) -> None:
    for label, node in (("0", "n2"), ("1", "n3"), ("1-2", "n4")):
        run = RunJournal(tmp_path, job=JOB, label=label)
        run.start()
        run.judge(NodeVerdict(node=node, level=Level.FAULTY, reason="no allgather"))
        run.judge(NodeVerdict(node="n5", level=Level.SLOW, reason="slow"))
    own = run.directory.parent / "1-3"

    assert past(own, started(1), ["n1"])[1] == ("n3", "n4")
    assert past(own, started(1), ["n1", "n4"])[1] == ("n3",)
    assert past(own, started(2), ["n1"])[1] == ()


def test_an_attempt_whose_journal_cannot_be_read_counts_as_a_requeue(tmp_path: Path) -> None:
    newer = tmp_path / "job" / "0"
    newer.mkdir(parents=True)
    (newer / "master.jsonl").write_text('{"v":99,"id":"master:0","time_s":0,"kind":"x"}\n')

    assert past(tmp_path / "job" / "1", started(1), [])[0] == 1


# --- where it may run ----------------------------------------------------------------------------

PARTITION = frozenset({"n1", "n2", "n3", "n4"})


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    """Return a cluster of four nodes and a job on two, all of different features."""
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.set(partition_nodes="n[1-4]", reservations={"mine": ["n[1-3]", "SPEC_NODES"]})
    slurm.run_job(JOB, ["n1", "n2"])
    for node, features in {"n1": "h100,ib", "n2": "ib,h100", "n3": "h100", "n4": "ib"}.items():
        slurm.change_node(node, features=features)
    return slurm


def facts(slurm: FakeSlurm, **changes: object) -> JobFacts:
    slurm.change_job(JOB, **changes)
    return read_facts(
        Policy(),
        started=started(0, job_id=JOB),
        directory=slurm.directory / "run",
        client=Client(slurm.environ()),
        uid=65534,
    )


@rows
def test_a_job_may_run_on_the_nodes_that_have_all_features_it_asks_for(
    slurm: FakeSlurm, constraint: str, nodes: set[str], free: int | None
) -> None:
    slurm.set(reservations={})

    known = facts(slurm, Features=constraint)

    narrowed = (f"--constraint={constraint}",) if nodes != PARTITION else ()
    assert known.candidates == frozenset(nodes)
    assert (known.narrowed_by, known.free) == (narrowed, free)


@rows
def test_a_job_may_run_on_the_nodes_of_its_reservation_if_these_stay_the_same(
    slurm: FakeSlurm, name: str, flags: str, nodes: set[str]
) -> None:
    slurm.set(reservations={"mine": ["n[1-3]", flags], "other": ["n4", "SPEC_NODES"]})

    known = facts(slurm, Reservation=name)

    narrowed = ("--reservation=mine",) if nodes != PARTITION else ()
    assert known.candidates == frozenset(nodes)
    assert known.narrowed_by == narrowed


def test_a_reservation_that_slurm_does_not_show_rules_no_node_out(slurm: FakeSlurm) -> None:
    slurm.set(refuse={"reservation": "Access denied"})

    known = facts(slurm, Features="ib", Reservation="mine")

    assert known.narrowed_by == ("--constraint=ib",)
    assert known.free is None
    assert "Access denied" in known.free_unknown


@pytest.mark.parametrize(
    ("start", "free"),
    [("2026-01-01T11:00:00", 1), ("2026-01-01T12:05:00", 1), ("2026-01-01T13:00:00", 2)],
)
def test_a_node_that_others_have_reserved_from_before_the_jobs_end_is_not_free(
    slurm: FakeSlurm, start: str, free: int
) -> None:
    slurm.set(reservations={"theirs": ["n4", "SPEC_NODES", start]})

    assert facts(slurm, EndTime="2026-01-01T12:00:00").free == free
