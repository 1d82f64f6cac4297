# SPDX-License-Identifier: Apache-2.0
"""The end of a check that could not measure: in the journal, in the job's comment, in Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.acting.unchecked import end_unchecked
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records.errors import JournalError
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    Disposition,
    Record,
    RunFinished,
    Unchecked,
)
from slurm_health.system.slurm.client import Client
from tests.support.fake_slurm import FakeSlurm

JOB = 12
FOUND = Unchecked(reason="no torch", remedy="name an interpreter")
NOTE = "slurm-health: UNCHECKED: no torch; name an interpreter"


class Scene:
    """A job whose nodes could not be checked."""

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm(directory / "slurm")
        self.slurm.run_job(JOB, ["n1", "n2"], Comment="mine")
        self.records: list[Record] = []
        self.broken = False

    def append(self, record: Record) -> None:
        if self.broken:
            raise JournalError(Path("/j"), "full")
        self.records.append(record)

    def end(self, choice: OnUnchecked, *, in_journal: bool = True) -> RunFinished:
        return end_unchecked(
            FOUND,
            choice,
            job=str(JOB),
            client=Client(self.slurm.environ(), patience_s=0.0),
            append=self.append,
            in_journal=in_journal,
        )

    @property
    def comment(self) -> str:
        return str(self.slurm.job(JOB)["Comment"])


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("choice", [OnUnchecked.PROCEED, OnUnchecked.STOP])
@pytest.mark.parametrize("unseen", ["broken", "not shared"])
def test_where_the_journal_cannot_say_it_the_comment_does_and_keeps_the_jobs_own(
    scene: Scene, choice: OnUnchecked, unseen: str
) -> None:
    scene.broken = unseen == "broken"
    scene.end(choice, in_journal=unseen == "broken")
    assert scene.comment == f"{NOTE} | own comment: mine"
    scene.end(choice, in_journal=False)
    assert scene.comment == f"{NOTE} | own comment: mine"


@pytest.mark.parametrize("refused", ["squeue", "update"])
def test_a_comment_that_cannot_be_read_or_set_ends_nothing(scene: Scene, refused: str) -> None:
    scene.slurm.set(refuse={"--format=%k" if refused == "squeue" else "update": "no"})
    assert scene.end(OnUnchecked.PROCEED, in_journal=False).disposition is Disposition.PROCEED
    assert scene.comment == "mine"


@pytest.mark.parametrize("broken", [False, True])
def test_a_job_that_is_held_says_why_and_what_to_type(scene: Scene, broken: bool) -> None:
    scene.broken = broken
    finished = scene.end(OnUnchecked.HOLD)
    assert finished.disposition is Disposition.HOLD
    assert scene.slurm.job(JOB)["Priority"] == 0
    assert scene.comment == (
        "slurm-health: held (UNCHECKED: no torch; name an interpreter). To start it anyway:"
        " scontrol release 12 | own comment: mine"
    )
    intended = ActionIntended(action=Action.HOLD, reason="--on-unchecked=hold")
    assert scene.records == ([] if broken else [FOUND, intended, finished])


def test_a_job_that_was_held_and_released_runs_and_has_its_own_comment_back(scene: Scene) -> None:
    scene.end(OnUnchecked.HOLD)
    assert scene.end(OnUnchecked.HOLD).disposition is Disposition.PROCEED
    assert scene.comment == "mine"
    scene.end(OnUnchecked.HOLD)
    assert scene.slurm.job(JOB)["Restarts"] == 2  # held anew: the answer was about that once


@pytest.mark.parametrize(
    ("change", "setting", "said"),
    [
        ({"Requeue": 0}, {}, "it may not be requeued (--no-requeue"),
        ({"BatchFlag": 0}, {}, "it is not a batch job"),
        ({}, {"requeuehold": "Requested operation is disabled"}, "operation is disabled"),
        ({}, {"show": "Unable to read"}, "Unable to read"),
    ],
)
def test_a_job_that_cannot_be_held_stops_and_says_why(
    scene: Scene, change: dict[str, int], setting: dict[str, str], said: str
) -> None:
    scene.slurm.change_job(JOB, **change)
    scene.slurm.set(refuse=setting)
    finished = scene.end(OnUnchecked.HOLD)
    assert (finished.disposition, finished.exit_code) == (Disposition.STOP, 4)
    assert said in finished.reason
    assert scene.records[-1] == finished
    assert scene.comment == "mine"
    failed = [record for record in scene.records if isinstance(record, ActionDone)]
    assert all(not each.succeeded for each in failed)
    assert len(failed) == ("requeuehold" in setting)
