# SPDX-License-Identifier: Apache-2.0
"""What a job's notes and its comment say, and what can be done about an error."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.facts import (
    leaving_note,
    own_comment,
    with_own_comment,
)
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
from slurm_health.system.slurm.parsing import parse_pairs


@given(st.text(), st.text())
def test_a_jobs_own_comment_comes_back_from_behind_our_note(own: str, reason: str) -> None:
    if own.startswith("slurm-health:"):
        return
    note = with_own_comment(leaving_note("12", ["n3"], [], reason), own)

    assert own_comment(note) == own
    assert (
        own_comment(with_own_comment(leaving_note("12", ["n4"], [], reason), own_comment(note)))
        == own
    )


def test_a_note_holds_no_word_that_scontrol_prints_as_a_field() -> None:
    text = leaving_note("12_3", ["n3"], ["n1"], "n3: JobState=RUNNING in its log")

    fields = parse_pairs(f"JobState=PENDING Comment={text} Power=")

    assert set(fields) == {"JobState", "Comment", "Power"}
    assert fields["Comment"] == text


def test_a_note_says_why_and_the_very_commands_to_type() -> None:
    assert leaving_note("12", ["n3"], ["n1"], "n3: no allgather") == (
        "slurm-health: requeued without n3 (n3: no allgather). If the job stays held, release it by"
        " hand: scontrol update jobid=12 excnodelist=n[1,3] starttime=now; scontrol release 12"
    )


@given(st.text(min_size=400))
def test_a_long_reason_is_cut(reason: str) -> None:
    assert len(leaving_note("12", ["n3"], [], reason)) < 500


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
