# SPDX-License-Identifier: Apache-2.0
"""The helper job: the job is let go only where Slurm has been seen to keep the list."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.preflight.acting.job_facts import placement
from slurm_health.preflight.acting.release_elsewhere import (
    PENDING_S,
    TRIES,
    Move,
    release_elsewhere,
)
from slurm_health.records.records import ActionDone
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Job
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import Clock
from tests.support.rows import rows

JOB = 12
OWN = "it's mine; a=b"


class Scene:
    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(JOB, ["n1", "n2"])
        self.client = Client(self.slurm.environ())
        self.directory = directory / "run"
        self.directory.mkdir()
        self.clock = Clock(0.0)
        self.slept: list[float] = []
        self.on_sleep: Callable[[float], None] = lambda _: None

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now_s += seconds
        self.on_sleep(seconds)

    def release(self, *exclude: str, least: int | None = None) -> bool:
        return release_elsewhere(
            Move(job=str(JOB), attempt=0, exclude=exclude, comment=OWN, least=least),
            here="n1",
            directory=self.directory,
            client=self.client,
            clock=self.clock,
            sleep=self.sleep,
        )

    def recorded(self) -> tuple[bool, str]:
        (entry,) = journal.read_all(self.directory, journal.REQUEUE)
        assert isinstance(entry.record, ActionDone)
        assert entry.record.action == "requeue"
        return entry.record.succeeded, entry.record.detail


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_nothing_is_changed_before_the_job_has_stopped_completing(scene: Scene) -> None:
    scene.slurm.set(completing_steps=5)
    scene.client.requeue_held(JOB)
    before = len(scene.slurm.calls("scontrol"))

    assert scene.release("n2")

    called = [" ".join(call[1:3]) for call in scene.slurm.calls("scontrol")[before:]]
    assert called[:5] == ["show job"] * 5
    assert not called[5].startswith("update")


@pytest.mark.heavy
def test_a_list_that_slurm_does_not_keep_leaves_the_job_held_with_a_word_of_why(
    scene: Scene,
) -> None:
    scene.slurm.set(lose_lists=True)
    scene.client.requeue_held(JOB)

    assert not scene.release("n2")

    job = scene.slurm.job(JOB)
    assert (job["state"], job["Priority"]) == ("PENDING", 0)
    assert scene.slurm.calls("scontrol", "release") == []
    assert len(scene.slept) >= TRIES
    assert "Slurm did not keep the list" in job["Comment"]
    assert job["Comment"].endswith(OWN)
    assert f"scontrol release {JOB}" in job["Comment"]
    succeeded, detail = scene.recorded()
    assert not succeeded
    assert detail.startswith("left held")


@pytest.mark.parametrize(
    "trouble",
    [{"lose_releases": True}, {"refuse": {"release": "Resource temporarily unavailable"}}],
    ids=["no effect", "refused"],
)
def test_a_release_without_effect_is_noticed_and_tried_again(
    scene: Scene, trouble: dict[str, object]
) -> None:
    scene.slurm.set(**trouble)
    scene.client.requeue_held(JOB)

    def mend(_: float) -> None:
        if len(scene.slurm.calls("scontrol", "release")) == 2:
            scene.slurm.set(**{name: {} for name in trouble})

    scene.on_sleep = mend

    assert scene.release("n2")
    assert len(scene.slurm.calls("scontrol", "release")) == 3
    assert scene.recorded() == (True, "without n2")


@rows
def test_a_job_that_has_ended_or_is_forgotten_or_requeued_again_is_left_alone(
    scene: Scene, held: bool, changes: dict[str, object], said: str
) -> None:
    if held:
        scene.client.requeue_held(JOB)
    if changes:
        scene.slurm.change_job(JOB, **changes)
    else:
        scene.slurm.forget_job(JOB)

    assert not scene.release("n2")

    assert scene.slept == []
    assert scene.slurm.calls("scontrol", "update") == []
    assert scene.slurm.calls("scontrol", "release") == []
    succeeded, detail = scene.recorded()
    assert (succeeded, said in detail) == (False, True)


def test_a_job_that_is_never_requeued_is_given_up(scene: Scene) -> None:
    scene.slurm.set(refuse={"show": "slurm_load_jobs error: Socket timed out"})

    def hurry(seconds: float) -> None:
        scene.clock.now_s += 600 * seconds

    scene.on_sleep = hurry
    assert not scene.release("n2")

    assert PENDING_S <= scene.clock.now_s < 2 * PENDING_S
    assert not scene.recorded()[0]


def test_a_journal_that_is_gone_does_not_keep_the_job_held(scene: Scene) -> None:
    scene.client.requeue_held(JOB)
    scene.directory.rmdir()

    assert scene.release("n2")


@pytest.mark.parametrize(("flags", "held_s"), [("(null)", 1.1), ("Alloc,DeferBatch", 2.1)])
def test_a_job_stays_held_until_its_nodes_have_forgotten_the_attempt_that_ended(
    scene: Scene, flags: str, held_s: float
) -> None:
    scene.slurm.set(prolog_flags=flags)
    scene.client.requeue_held(JOB)

    assert scene.release("n2")

    assert scene.slept[-1] == held_s


@rows
def test_a_job_with_a_range_of_nodes_asks_for_no_more_than_are_free(
    scene: Scene, least: int | None, busy: list[str], asked: tuple[str, str, str]
) -> None:
    scene.slurm.change_job(JOB, size=[3, 12, 6], tasks_per_node=2)
    if busy:
        scene.slurm.run_job(99, busy)
    scene.client.requeue_held(JOB)

    assert scene.release("n2", least=least)

    job = scene.slurm.job(JOB)
    nodes, cpus, tasks = map(str, job["size"])
    left = (job.get("NumNodes", nodes), job.get("NumTasks", tasks), job.get("NumCPUs", cpus))
    assert left == asked


def test_a_job_that_was_made_smaller_asks_for_no_more_tasks_than_its_nodes_may_have(
    scene: Scene,
) -> None:
    scene.slurm.change_job(JOB, size=[2, 12, 6], tasks_per_node=2)  # of three nodes (Slurm 22.05)
    scene.client.requeue_held(JOB)

    assert scene.release("n2")

    job = scene.slurm.job(JOB)
    assert (job["NumNodes"], job["NumTasks"], job["NumCPUs"]) == ("2", "4", "8")


def test_account_qos_and_reservation_of_the_job_are_the_helpers_too(scene: Scene) -> None:
    job = scene.client.job(JOB)
    fields = {**job.fields, "Account": "ml", "QOS": "high", "Partition": "gpu"}
    fields["Reservation"] = "mine"

    found = placement(Job(job_id=JOB, states=job.states, reason="", fields=fields))

    assert found == {"partition": "gpu", "account": "ml", "qos": "high", "reservation": "mine"}


def test_a_job_that_is_cancelled_while_it_is_being_released_is_left_alone(scene: Scene) -> None:
    scene.slurm.set(lose_releases=True)
    scene.client.requeue_held(JOB)

    def cancel(_: float) -> None:
        if scene.slurm.calls("scontrol", "release"):
            scene.slurm.change_job(JOB, state="CANCELLED")

    scene.on_sleep = cancel

    assert not scene.release("n2")

    assert len(scene.slurm.calls("scontrol", "release")) == 1
    assert scene.recorded() == (False, "the job has ended (CANCELLED)")
    assert scene.slurm.job(JOB)["Comment"] == ""


def test_a_job_that_somebody_else_let_run_on_the_bad_node_is_not_touched(scene: Scene) -> None:
    scene.client.requeue_held(JOB)

    def release(_: float) -> None:
        scene.slurm.change_job(JOB, state="RUNNING", nodes=["n1", "n2"])

    scene.slurm.set(completing_steps=1)
    scene.on_sleep = release

    assert not scene.release("n2")

    assert scene.slurm.calls("scontrol", "update") == []
    assert "the job was released by someone else" in scene.recorded()[1]
