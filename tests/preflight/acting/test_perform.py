# SPDX-License-Identifier: Apache-2.0
"""What is done about a verdict, on a cluster that refuses what Slurm refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.acting import requeue_helper
from slurm_health.preflight.acting.perform import Acting, RecordAppender, act
from slurm_health.preflight.decide.policy import OnInconclusive, Policy
from slurm_health.records.errors import ExitCode
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    Record,
    RunFinished,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import RunJournal, run_started
from tests.support.sites import write_site

JOB = 12
ELSEWHERE = Policy(on_inconclusive=OnInconclusive.REQUEUE)
HOLD = Policy(on_inconclusive=OnInconclusive.HOLD)


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
    ) -> RunFinished:
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
                client=Client(self.slurm.environ()),
                uid=uid,
                append=self.append,
                helper=requeue_helper.Helper(
                    command=("slurm-health", "requeue-helper"),
                    directory=self.run.directory,
                    environ=self.slurm.environ(),
                    uid=0,
                ),
                site_file=self.site_file,
                clock=lambda: 1_000_000.0,
            ),
        )

    def told(self) -> list[tuple[str, str, bool | None]]:
        """Return kind, action and success of each record, in order."""
        found: list[tuple[str, str, bool | None]] = []
        for record in self.records:
            match record:
                case ActionIntended(action=action):
                    found.append(("intended", action, None))
                case ActionDone(action=action, succeeded=succeeded):
                    found.append(("done", action, succeeded))
                case RunFinished(disposition=disposition):
                    found.append(("finished", disposition, None))
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_undecided_nodes_cause_no_call_either(scene: Scene) -> None:
    finished = scene.act(uid=0, n3=Level.INCONCLUSIVE)

    assert (finished.disposition, finished.exit_code) == ("proceed", ExitCode.INCONCLUSIVE)
    assert scene.slurm.calls() == []


def test_a_drain_that_is_refused_does_not_keep_the_job_on_the_bad_node(scene: Scene) -> None:
    finished = scene.act(uid=0, n3=Level.FAULTY)  # root in name only

    assert finished.disposition == "requeue"
    assert ("done", "drain", False) in scene.told()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"BatchFlag": 0}, "not a batch job"),
        ({"Requeue": 0}, "--no-requeue"),
        ({"ReqNodeList": "n[2-3]"}, "it asks for n3 by name (--nodelist)"),
    ],
)
def test_a_job_that_cannot_move_stops_and_says_why(
    scene: Scene, changes: dict[str, object], said: str
) -> None:
    scene.slurm.change_job(JOB, **changes)

    finished = scene.act(n3=Level.FAULTY)

    assert (finished.disposition, finished.exit_code) == ("stop", ExitCode.BAD_NODES)
    assert said in finished.reason
    assert scene.slurm.calls("sbatch") == scene.slurm.calls("scontrol", "requeuehold") == []


@pytest.mark.parametrize(("wanted", "nodes"), [(4, ["n1", "n2", "n3"]), (3, []), (None, [])])
def test_a_job_that_started_smaller_than_wanted_names_its_nodes_for_the_scripts_variables(
    scene: Scene, wanted: int | None, nodes: list[str]
) -> None:
    policy = Policy(nodes_wanted=wanted, nodes_needed=wanted and 3)

    finished = scene.act(policy=policy, n3=Level.HEALTHY)

    assert (finished.disposition, finished.nodes) == ("proceed", nodes)


def test_a_slow_node_is_left_for_an_idle_one(scene: Scene) -> None:
    finished = scene.act(n3=Level.SLOW)

    assert finished.disposition == "requeue"
    (asked,) = scene.slurm.calls("sbatch", "--test-only")
    assert {"--nodes=1", "--exclude=n[1-3]", "--partition=main", "--cpus-per-task=2"} <= set(asked)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"waiting": {"15": "Priority"}}, "job 15 waits for nodes of partition main"),
        ({"private": "accounts,jobs"}, "(PrivateData=jobs)"),
        ({"refuse": {"--test-only": "allocation failure: not now"}}, "allocation failure: not now"),
        ({"refuse": {"--states=PENDING": "Socket timed out"}}, "no other nodes: Socket timed out"),
    ],
)
def test_a_slow_node_is_not_left_where_slurm_does_not_promise_another_at_once(
    scene: Scene, changes: dict[str, object], said: str
) -> None:
    scene.slurm.set(**changes)

    finished = scene.act(n3=Level.SLOW)

    assert finished.disposition == "proceed"
    assert said in finished.reason
    assert "continuing with n3 anyway" in finished.reason
    assert scene.slurm.calls("scontrol", "requeuehold") == []


@pytest.mark.parametrize(
    ("node", "state", "said"),
    [
        ("n4", "IDLE+DRAIN", "no other nodes: allocation failure: Requested node configuration"),
        ("n1", "MIXED+DRAIN", "it would have to wait for nodes: n1 is MIXED+DRAIN"),
    ],
)
def test_a_node_that_takes_no_jobs_is_no_place_to_go_to(
    scene: Scene, node: str, state: str, said: str
) -> None:
    scene.slurm.change_node(node, state=state)

    finished = scene.act(n3=Level.SLOW)

    assert finished.disposition == "proceed"
    assert said in finished.reason


def test_a_job_whose_requeue_is_refused_stays_on_its_slow_node(scene: Scene) -> None:
    scene.slurm.set(refuse={"requeuehold": "disabled"})

    finished = scene.act(n3=Level.SLOW)

    assert finished.disposition == "proceed"
    assert "could not move the job off n3" in finished.reason
    assert scene.slurm.calls("scancel") == [["scancel", "13"]]


def test_several_slow_nodes_are_left_together_or_not_at_all(scene: Scene) -> None:
    scene.slurm.add_node("n5")
    scene.slurm.run_job(15, ["n5"])
    finished = scene.act(n2=Level.SLOW, n3=Level.SLOW)

    assert finished.disposition == "proceed"
    assert "it would have to wait for 2 other nodes for up to 60 min" in finished.reason
    assert "continuing with n[2-3] anyway" in finished.reason


@pytest.mark.parametrize(("least", "nodes"), [(0, 1), (1, 1), (2, 2)])
def test_a_helper_has_as_many_nodes_as_its_partition_wants(
    scene: Scene, least: int, nodes: int
) -> None:
    scene.slurm.set(least_nodes=least)

    scene.act(n3=Level.FAULTY)

    (asked,) = scene.slurm.calls("sbatch")
    assert {f"--nodes={nodes}", f"--ntasks={nodes}"} <= set(asked)


def test_a_job_that_was_released_after_a_hold_is_not_held_for_the_same_node_again(
    scene: Scene,
) -> None:
    earlier = RunJournal(scene.run.directory.parents[2], job=JOB, label="7")
    earlier.write(
        journal.MASTER, ActionIntended(action=Action.HOLD, nodes=["n3"], reason="n3: no allgather")
    )

    assert scene.act(policy=HOLD, n3=Level.INCONCLUSIVE).disposition == "proceed"
    assert scene.act(policy=HOLD, n2=Level.INCONCLUSIVE, n3=Level.HEALTHY).disposition == "hold"


@pytest.mark.parametrize(
    ("held_for", "expected"), [([], "hold"), (["n2"], "hold"), (["n3"], "proceed")]
)
def test_a_job_that_was_held_for_want_of_a_helper_runs_once_a_person_has_released_it(
    scene: Scene, held_for: list[str], expected: str
) -> None:
    earlier = RunJournal(scene.run.directory.parents[2], job=JOB, label="7")
    earlier.write(
        journal.MASTER, ActionIntended(action=Action.HOLD, nodes=held_for, reason="no allgather")
    )
    scene.slurm.set(no_submissions=True)

    finished = scene.act(n3=Level.FAULTY)

    assert finished.disposition == expected
    assert ("a person released it" in finished.reason) is (expected == "proceed")


@pytest.mark.parametrize(
    "refusal", [{"no_submissions": True}, {"refuse": {"requeuehold": "disabled"}}]
)
def test_a_job_that_cannot_leave_nodes_in_doubt_stays_on_them(
    scene: Scene, refusal: dict[str, object]
) -> None:
    scene.slurm.set(**refusal)

    finished = scene.act(policy=ELSEWHERE, n3=Level.INCONCLUSIVE)

    assert (finished.disposition, finished.exit_code) == ("proceed", ExitCode.INCONCLUSIVE)
    assert "could not move the job off n3" in finished.reason
    assert scene.slurm.job(JOB)["state"] == "RUNNING"
    assert scene.slurm.job(JOB)["Comment"] == ""


def test_a_hold_that_is_refused_stops_the_job_and_gives_its_comment_back(scene: Scene) -> None:
    scene.slurm.change_job(JOB, Comment="mine")
    scene.slurm.set(refuse={"requeuehold": "Requested operation is presently disabled"})

    finished = scene.act(policy=HOLD, n3=Level.INCONCLUSIVE)

    assert (finished.disposition, finished.exit_code) == ("stop", ExitCode.INCONCLUSIVE)
    assert scene.slurm.job(JOB)["Comment"] == "mine"


def test_a_requeue_that_is_refused_withdraws_the_helper_and_stops(scene: Scene) -> None:
    scene.slurm.set(refuse={"requeuehold": "Requested operation is presently disabled"})

    finished = scene.act(n3=Level.FAULTY)

    assert finished.disposition == "stop"
    assert "presently disabled" in finished.reason
    assert scene.slurm.calls("scancel") == [["scancel", "13"]]
    assert scene.slurm.job(13)["state"] == "CANCELLED"
    assert ("done", "requeue", False) in scene.told()


def test_where_slurm_does_not_answer_the_job_stops_rather_than_run_on_a_bad_node(
    scene: Scene,
) -> None:
    scene.slurm.set(refuse={"show": "slurm_load error: something is wrong"})

    finished = scene.act(n3=Level.FAULTY)

    assert finished.disposition == "stop"
    assert "could not query Slurm" in finished.reason
    assert "something is wrong" in finished.reason


def test_what_was_decided_is_in_the_journal_before_it_is_done(tmp_path: Path) -> None:
    """An append that fails stops everything after it."""
    scene = Scene(tmp_path)
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
