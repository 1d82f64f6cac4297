# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose nodes could not be checked, and what its comment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.facts import own_comment, waiting_note, with_own_comment
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records.errors import (
    AllocationError,
    ConfigError,
    JournalBusy,
    JournalError,
    LocalizeError,
    SlurmCommandMissing,
    SlurmHealthError,
)
from slurm_health.records.records import Disposition, Unchecked

FOUND = Unchecked(reason="--python: torch: not found", remedy="correct that")
ODD = Unchecked(reason='a="b" | own comment: c\nd', remedy="do")


@pytest.mark.parametrize(
    ("choice", "disposition", "said"),
    [
        (OnUnchecked.PROCEED, Disposition.PROCEED, ""),
        (OnUnchecked.STOP, Disposition.STOP, " (--on-unchecked=stop)"),
        (OnUnchecked.HOLD, Disposition.HOLD, " (--on-unchecked=hold)"),
    ],
)
def test_a_job_does_what_its_user_chose_and_says_why_and_what_to_do(
    choice: OnUnchecked, disposition: Disposition, said: str
) -> None:
    ending = unchecked.end(FOUND, choice)
    assert (ending.disposition, ending.exit_code) == (disposition, 4)
    assert ending.reason == f"UNCHECKED: --python: torch: not found; correct that{said}"
    assert ending.nodes == ()


def test_a_job_that_a_person_released_from_a_hold_runs() -> None:
    ending = unchecked.end(FOUND, OnUnchecked.HOLD, released=True)
    assert ending.disposition is Disposition.PROCEED
    assert "it was held for that and released" in ending.reason


def test_a_job_that_was_to_be_held_and_cannot_be_stops() -> None:
    ending = unchecked.not_held(FOUND, "--no-requeue")
    assert ending.disposition is Disposition.STOP
    assert ending.reason.endswith("it cannot be held (--on-unchecked=hold): --no-requeue")


@pytest.mark.parametrize("found", [FOUND, ODD])
@pytest.mark.parametrize("own", ["", "mine: a=1 | 2", "the word UNCHECKED"])
def test_what_a_comment_says_is_found_again_and_the_jobs_own_is_kept(
    found: Unchecked, own: str
) -> None:
    for note, held in (
        (unchecked.note(found), False),
        (unchecked.holding_note(found, "12_3"), True),
    ):
        comment = with_own_comment(note, own)
        assert own_comment(comment) == own
        assert unchecked.was_held(comment) is held
        said = unchecked.said_in(comment)
        assert f"slurm-health: {said}" == note
        assert "UNCHECKED: " in said
        assert not {"=", '"', "\n"} & set(said)


def test_other_comments_say_nothing_of_it() -> None:
    waiting = waiting_note("12", ["n3"], [], "undecided")
    for comment in ("", "mine", "it ran UNCHECKED", waiting, f"{waiting} | own comment: UNCHECKED"):
        assert unchecked.said_in(comment) == ""
        assert not unchecked.was_held(comment)


@pytest.mark.parametrize(
    ("err", "remedy"),
    [
        (ConfigError("--python", "x", "no such executable"), "submit the job again"),
        (JournalError(Path("/j"), "its filesystem did not answer"), "--journal DIR"),
        (JournalError(Path("/j"), "full; choose another with --journal DIR"), "correct that"),
        (JournalBusy(Path("/j")), "correct that"),
        (SlurmCommandMissing("srun"), "srun hostname"),
        (AllocationError("SLURM_JOB_NODELIST", "empty"), "env | grep SLURM"),
        (LocalizeError("x"), "report it"),
    ],
)
def test_every_error_has_something_that_can_be_done_about_it(
    err: SlurmHealthError, remedy: str
) -> None:
    found = unchecked.unchecked_by(err)
    assert found.reason == str(err)
    assert remedy in found.remedy
