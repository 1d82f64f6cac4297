# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.preflight.decide.facts import (
    leaving_note,
    own_comment,
    with_own_comment,
)
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
