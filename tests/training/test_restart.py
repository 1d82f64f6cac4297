# SPDX-License-Identifier: Apache-2.0
"""What is done about a failed script, on a cluster that is played."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.allocation import Allocation
from slurm_health.records.records import Disposition, JobOutcome, VerdictReached
from slurm_health.records.script_records import (
    Attribution,
    Diagnosed,
    FailurePlanned,
    ProgressSeen,
    ScriptStarted,
)
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.diagnosis.failure import JobAtFailure, what_follows
from slurm_health.training.restart import FailedScript, after_failure, check_took_s, failure_of
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import run_started
from tests.support.rows import rows

JOB = 12
NODES = ("n1", "n2", "n3")


class Scene:
    """A job whose script has failed, and what becomes of it."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(JOB, list(NODES))
        self.root = directory / "journal"
        self.run = journal.job_directory(self.root, "lab", JOB) / "0"
        journal.create(self.run, [journal.MASTER])
        master = journal.Writer(self.run, journal.MASTER, lambda: 1.0)
        master.append(run_started(NODES), JobOutcome(disposition=Disposition.PROCEED, exit_code=0))
        self.started(2.0)
        self.told: list[JobOutcome] = []

    def started(self, time_s: float) -> None:
        record = ScriptStarted(script="train.sh", pid=1)
        journal.Writer(self.run, journal.SUPERVISOR, lambda: time_s).append(record)

    def diagnosed(self, attribution: Attribution, time_s: float = 3.0, *accused: str) -> None:
        record = Diagnosed(
            cause="a-cause",
            description="something broke",
            attribution=attribution.value,
            sureness="likely",
            accused=list(accused),
            evidence=["a line"],
        )
        journal.Writer(self.run, journal.POST_MORTEM, lambda: time_s).append(record)

    def failed(self, *nodes: str) -> FailedScript:
        """Return the script that has failed on these nodes."""
        return FailedScript(
            directory=self.run,
            restart=1,
            max_restarts=2,
            batch_node="n1",
            nodes=nodes,
            spares=(),
        )

    def failure(self, *nodes: str) -> tuple[Diagnosed | None, JobAtFailure]:
        """Return why it failed on these nodes, and what is known of the job."""
        client = Client(self.slurm.environ(), patience_s=0.0)
        return failure_of(self.failed(*nodes), str(JOB), client, Policy())

    def outcome(self, failed: FailedScript | None = None) -> JobOutcome:
        environ = {**self.slurm.environ(), "SLURMD_NODENAME": "n1"}
        return after_failure(
            failed or self.failed(),
            Allocation(job_id=JOB, attempt=0, cluster="lab", partition="main", nodes=NODES),
            CheckSettings(
                spec=JobSpec(),
                journal_root=self.root,
                python="/no/such/python",
                policy=Policy(),
                limits=TimeLimits(),
                phases=(),
                probe_environ=environ,
                tell=lambda finished, _: self.told.append(finished),
            ),
            environ,
        )

    def plans(self) -> list[FailurePlanned]:
        entries = journal.read_all(self.run, journal.RESTART)
        return [e.record for e in entries if isinstance(e.record, FailurePlanned)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_users_error_stops_the_job_and_changes_nothing_in_slurm(scene: Scene) -> None:
    scene.diagnosed(Attribution.USER)

    finished = scene.outcome()

    assert finished.disposition == "stop"
    assert "something broke (user error)" in finished.reason
    assert scene.told == [finished]
    assert {call[:2] for call in map(tuple, scene.slurm.calls())} <= {("scontrol", "show")}
    (plan,) = scene.plans()
    assert (plan.plan, plan.restart, plan.max_restarts, plan.evidence) == ("stop", 1, 2, ["a line"])


def test_a_job_that_slurm_has_ended_is_not_started_again(scene: Scene) -> None:
    scene.slurm.run_job(JOB, list(NODES), state="CANCELLED")
    scene.diagnosed(Attribution.TRANSIENT)

    assert scene.outcome().disposition == "stop"
    assert "CANCELLED" in scene.plans()[0].reason


def test_a_node_that_is_accused_is_left_elsewhere_where_the_job_has_no_spare(
    scene: Scene,
) -> None:
    scene.diagnosed(Attribution.NODE, 3.0, "n2")

    finished = scene.outcome()

    assert finished.disposition == "requeue"
    run = scene.run.parent / "0-2"
    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    (verdict,) = (r for r in records if isinstance(r, VerdictReached))
    assert [(each.node, each.level.value) for each in verdict.nodes] == [("n2", "faulty")]
    assert "something broke" in verdict.nodes[0].reason
    assert scene.told[-1] == finished


def test_what_was_found_of_an_earlier_start_of_the_script_does_not_count(scene: Scene) -> None:
    scene.diagnosed(Attribution.TRANSIENT, time_s=3.0)
    scene.started(4.0)
    scene.slurm.run_job(JOB, list(NODES), state="CANCELLED")

    scene.outcome()

    assert scene.plans()[0].evidence == []


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """How n4 is when the script has failed, whether it is lost, and the nodes of what follows."""

    lost: bool
    follows: list[str]
    state: str = ""
    refused: str = ""
    accused: list[str] = []


@rows
def test_what_became_of_a_fourth_node_decides_where_the_job_goes_on(
    scene: Scene, case: Case
) -> None:
    if case.state:
        scene.slurm.change_node("n4", state=case.state)
    if case.refused:
        scene.slurm.set(refuse={"node": case.refused})
    if case.accused:
        scene.diagnosed(Attribution.NODE, 3.0, *case.accused)

    cause, failure = scene.failure(*NODES, "n4")

    why = f"Slurm took n4 out of the job; it is {case.state}"
    assert failure.lost == ((("n4", why),) if case.lost else ())
    assert case.accused or failure.nodes == ((*NODES, "n4") if case.lost else NODES)
    action = what_follows(cause, failure)
    assert list(action.nodes) == case.follows
    assert case.accused or case.lost or not getattr(action, "at_fault", ())


def test_a_script_is_started_again_on_the_nodes_that_it_has_not_given_back(scene: Scene) -> None:
    scene.diagnosed(Attribution.TRANSIENT)

    finished = scene.outcome(failed=scene.failed(*NODES, "n4"))

    assert (finished.disposition, finished.nodes) == ("proceed", list(NODES))
    assert scene.plans()[0].nodes == []


Words = tuple[str, ...]  # of one attempt: the plans that followed its failures, oldest first


@rows
def test_a_failure_in_the_same_words_counts_across_a_requeue_until_a_node_is_left(
    scene: Scene, attempts: list[Words], follows: str
) -> None:
    now = 10.0
    for number, plans in enumerate(attempts):
        scene.run = scene.run.parent / f"{number}"
        journal.create(scene.run, [journal.MASTER])
        for plan in plans:
            scene.started(now)
            scene.diagnosed(Attribution.UNDECIDED, now + 1)
            if plan:
                planned = FailurePlanned(plan=plan, reason="why", restart=1, max_restarts=3)
                journal.Writer(scene.run, journal.RESTART, partial(float, now + 2)).append(planned)
            now += 10

    assert what_follows(*scene.failure(*NODES)).kind == follows


def test_the_last_step_and_checkpoint_of_every_start_are_known(scene: Scene) -> None:
    for time_s, steps in ((10.0, ((40, "saved a.pt"), (120, ""))), (20.0, ()), (30.0, ((90, ""),))):
        scene.started(time_s)
        for step, saved in steps:
            seen = ProgressSeen(node="n1", step=step, saved=saved)
            journal.Writer(scene.run, journal.MONITOR, partial(float, time_s + 1)).append(seen)

    _, failure = scene.failure(*NODES)
    assert failure.steps == (0, 120, 0, 90)
    assert failure.saved == ("", "saved a.pt", "", "")


def test_how_long_a_check_took_is_known_by_its_verdict(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert check_took_s(scene.run) is None

    verdict = VerdictReached(nodes=[])
    journal.Writer(scene.run, journal.MASTER, lambda: 31.5).append(verdict)
    journal.Writer(scene.run, journal.MASTER, lambda: 99.0).append(verdict)

    assert check_took_s(scene.run) == 30.5
