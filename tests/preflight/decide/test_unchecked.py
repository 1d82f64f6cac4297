# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose nodes could not be checked, and what its comment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.facts import leaving_note, own_comment, with_own_comment
from slurm_health.records.errors import (
    AllocationError,
    ConfigError,
    JournalBusy,
    JournalError,
    LocalizeError,
    SlurmCommandMissing,
    SlurmHealthError,
)
from slurm_health.records.records import Unchecked

FOUND = Unchecked(reason="--python: torch: not found", remedy="correct that")
ODD = Unchecked(reason='a="b" | own comment: c\nd', remedy="do")


@pytest.mark.parametrize("found", [FOUND, ODD])
@pytest.mark.parametrize("own", ["", "mine: a=1 | 2", "the word UNCHECKED"])
def test_what_a_comment_says_is_found_again_and_the_jobs_own_is_kept(
    found: Unchecked, own: str
) -> None:
    note = unchecked.note(found)
    comment = with_own_comment(note, own)
    assert own_comment(comment) == own
    said = unchecked.said_in(comment)
    assert f"slurm-health: {said}" == note
    assert "UNCHECKED: " in said
    assert not {"=", '"', "\n"} & set(said)


def test_other_comments_say_nothing_of_it() -> None:
    leaving = leaving_note("12", ["n3"], [], "no allgather")
    for comment in ("", "mine", "it ran UNCHECKED", leaving, f"{leaving} | own comment: UNCHECKED"):
        assert unchecked.said_in(comment) == ""


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
