# SPDX-License-Identifier: Apache-2.0
"""What is done about a verdict, drains too, on a cluster that refuses what Slurm refuses."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.node.rules import drain_note
from slurm_health.node.rules.settings import Breaker
from slurm_health.node.shared import read_ledger
from slurm_health.preflight.acting.perform import Acting, RecordAppender, act
from slurm_health.preflight.acting.release_elsewhere import PENDING_S, TRIES, Move, helper_name
from slurm_health.preflight.config import SITE_FILE_VARIABLE
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.records import Action, ActionDone, JobOutcome, Record, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import RunJournal, run_started
from tests.support.rows import rows
from tests.support.sites import write_site

JOB = 12


class Scene:
    """A job on n1 to n3, its check, and what was recorded."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(JOB, ["n1", "n2", "n3"])
        self.run = RunJournal(directory / "journal", job=JOB, nodes=["n1", "n2", "n3"])
        self.shared = directory / "shared"
        self.shared.mkdir(mode=0o755)
        self.site_file = write_site(directory / "etc", f"[breaker]\ndirectory='{self.shared}'\n")
        self.records: list[Record] = []
        self.append: RecordAppender = self.records.append

    def act(
        self, *, uid: int = 65534, policy: Policy | None = None, array: str = "", **levels: Level
    ) -> JobOutcome:
        judged = [
            NodeVerdict(node=node, level=level, component="network", reason="no allgather")
            for node, level in {"n1": Level.HEALTHY, "n2": Level.HEALTHY, **levels}.items()
        ]
        return act(
            VerdictReached(nodes=judged),
            Acting(
                started=run_started(["n1", "n2", "n3"], array=array),
                directory=self.run.directory,
                policy=policy or Policy(),
                environ={
                    **self.slurm.environ(),
                    SITE_FILE_VARIABLE: str(self.site_file),
                    "SLURM_NTASKS": "64",
                },
                append=self.append,
                uid=uid,
                clock=lambda: 1_000_000.0,
            ),
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """How n3 is, what Slurm shows and refuses, and what becomes of the job."""

    n3: Level
    disposition: str
    says: list[str]
    code: int | None = None
    slurm: dict[str, Any] = {}
    job: dict[str, Any] = {}
    nodes: dict[str, dict[str, str]] = {}
    cancelled: str = ""


@rows
def test_what_slurm_shows_and_refuses_decides_whether_a_job_moves(scene: Scene, case: Case) -> None:
    scene.slurm.set(**case.slurm)
    scene.slurm.change_job(JOB, **case.job)
    for name, changes in case.nodes.items():
        scene.slurm.change_node(name, **changes)
    before = scene.slurm.job(JOB)

    finished = scene.act(n3=case.n3)

    after = scene.slurm.job(JOB)
    assert finished.disposition == case.disposition
    assert [words for words in case.says if words not in finished.reason] == []
    assert case.code in {None, finished.exit_code}
    assert "--exclude" not in finished.reason or case.disposition == "stop"
    assert len(scene.slurm.calls("sinfo")) <= 1
    assert (after == before) is (case.disposition != "requeue")
    assert scene.slurm.calls("scancel") == ([["scancel", case.cancelled]] if case.cancelled else [])


@pytest.mark.parametrize(("wanted", "nodes"), [(4, ["n1", "n2", "n3"]), (3, []), (None, [])])
def test_a_job_that_started_smaller_than_wanted_names_its_nodes_for_the_scripts_variables(
    scene: Scene, wanted: int | None, nodes: list[str]
) -> None:
    policy = Policy(nodes_wanted=wanted, nodes_needed=wanted and 3)

    finished = scene.act(policy=policy, n3=Level.HEALTHY)

    assert (finished.disposition, finished.nodes) == ("proceed", nodes)


@pytest.mark.parametrize(
    ("limit", "minutes", "least", "nodes"),
    [("infinite", 15, 0, 1), ("10:00", 10, 1, 1), ("1:00:00", 15, 2, 2), ("7-00:00:00", 15, 0, 1)],
)
def test_a_helper_asks_for_the_time_and_the_nodes_that_its_partition_gives(
    scene: Scene, limit: str, minutes: int, least: int, nodes: int
) -> None:
    scene.slurm.set(time_limit=limit, least_nodes=least)

    scene.act(n3=Level.FAULTY)

    (asked,) = scene.slurm.calls("sbatch")
    assert {f"--time={minutes}", f"--nodes={nodes}", f"--ntasks={nodes}"} <= set(asked)


def test_the_helper_is_one_small_job_beside_the_job_and_not_on_the_bad_node(scene: Scene) -> None:
    scene.slurm.change_job(JOB, Comment="it's mine; a=b")

    scene.act(n3=Level.FAULTY)

    (call,) = scene.slurm.calls("sbatch")
    assert {
        f"--job-name={helper_name(JOB, 0)}",
        "--ntasks=1",
        "--no-requeue",
        "--exclude=n3",
        "--partition=main",
        f"--chdir={scene.run.directory}",
    } <= set(call)
    assert not [word for word in call if word.startswith(("--account", "--qos"))]
    (limit,) = [word.removeprefix("--time=") for word in call if word.startswith("--time=")]
    assert int(limit) * 60 > PENDING_S + TRIES
    shebang, command = scene.slurm.job(JOB + 1)["script"].splitlines()
    *words, directory, told = shlex.split(command)
    assert (shebang, words[0], words[-1]) == ("#!/bin/sh", "exec", "requeue-helper")
    assert directory == f"--directory={scene.run.directory}"
    assert msgspec.json.decode(told.removeprefix("--move="), type=Move) == Move(
        job=str(JOB),
        attempt=0,
        exclude=("n3",),
        comment="it's mine; a=b",
        leave=("n3",),
        reason="n3: no allgather",
    )


def test_a_helper_that_cannot_be_cancelled_is_a_warning_and_no_error(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.slurm.set(refuse={"requeuehold": "disabled", "13": "Access denied"})

    assert scene.act(n3=Level.FAULTY).disposition == "stop"

    assert "could not cancel helper job 13: " in caplog.text


@rows
def test_a_helper_leaves_the_jobs_nodes_to_it_if_they_forget_late_and_another_is_free(
    scene: Scene, flags: str, state: str, kept_off: bool
) -> None:
    scene.slurm.set(prolog_flags=flags)
    scene.slurm.change_node("n4", state=state)

    scene.act(n3=Level.FAULTY)

    (asked,) = scene.slurm.calls("sbatch")
    assert (f"--exclude={'n[1-3]' if kept_off else 'n3'}") in asked


def test_what_was_decided_is_in_the_journal_before_it_is_done(scene: Scene) -> None:
    """An append that fails stops everything after it."""
    scene.slurm.set(admin=True)

    class Full(Exception):
        pass

    def refuse(_: Record) -> None:
        raise Full

    scene.append = refuse
    with pytest.raises(Full):
        scene.act(uid=0, n3=Level.FAULTY)

    assert not [call for call in scene.slurm.calls() if call[1] in {"update", "requeuehold"}]
    assert scene.slurm.calls("sbatch") == []
    assert journal.read_all(scene.run.directory, journal.MASTER) == []


def test_a_jobs_drain_has_a_hooks_note_and_counts_where_hooks_count(scene: Scene) -> None:
    scene.slurm.set(admin=True)

    scene.act(uid=0, n3=Level.FAULTY)

    note = drain_note.parse(scene.slurm.node("n3")["reason"])
    assert note is not None
    assert (note.checks, note.job, note.text) == (("network",), JOB, "network: no allgather")
    (entry,) = read_ledger(Breaker(directory=str(scene.shared))).entries
    assert (entry.node, entry.job, entry.uid, entry.hook) == ("n3", JOB, 0, "check")


@rows
def test_a_drain_that_cannot_be_made_is_recorded_and_the_job_leaves_the_bad_node_all_the_same(
    scene: Scene, slurm: dict[str, Any], node: dict[str, str], site: str | None, said: str
) -> None:
    scene.slurm.set(**slurm)
    scene.slurm.change_node("n3", **node)
    if site is not None:
        write_site(scene.site_file.parent, site)
    before = scene.slurm.node("n3")

    assert scene.act(uid=0, n3=Level.FAULTY).disposition == "requeue"

    (done,) = [r for r in scene.records if isinstance(r, ActionDone) and r.action is Action.DRAIN]
    assert (done.succeeded, done.nodes, said in done.detail) == (False, ["n3"], True)
    assert scene.slurm.node("n3") == before
    assert read_ledger(Breaker(directory=str(scene.shared))).entries == ()
