# SPDX-License-Identifier: Apache-2.0
"""The end of a check that could not measure: in the journal, in the job's comment, in Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.acting.unchecked import end_unchecked
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records.errors import JournalError
from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    Record,
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

    def end(self, choice: OnUnchecked, *, in_journal: bool = True) -> JobOutcome:
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
