# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job that Slurm ends: read in its output, asked where that does not tell."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slurm_health.system.slurm.last_word import became, in_output
from tests.cases import cases
from tests.support.fake_slurm import FakeSlurm

NOW_S = 1_700_000_000.0


def line(due_to: str = "", *, job: int = 12, time_s: float = NOW_S) -> bytes:
    """Return what slurmstepd writes, as of Slurm 22.05."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))
    return f"slurmstepd-n1: error: *** JOB {job} ON n1 CANCELLED AT {when}{due_to} ***\n".encode()


@cases("system/slurm/last_word.toml")
def test_slurms_line_in_the_output_tells(due_to: str, told: str) -> None:
    assert in_output(b"step 1\n" + line(due_to) + b"Terminated\n", "12", now_s=NOW_S) == told
    assert in_output(line(due_to), "13", now_s=NOW_S) == ""  # of another job
    assert in_output(line(due_to), "12", now_s=NOW_S + 3600) == ""  # of an earlier attempt
    assert in_output(b"*** JOB 12 ON n1 CANCELLED AT 2026-99-99T99:99:99 ***", "12", now_s=0) == ""


def test_a_line_counts_whatever_time_zone_the_job_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm's daemons write the machine's time."""
    monkeypatch.delenv("TZ", raising=False)
    time.tzset()
    written = line()
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert in_output(written, "12", now_s=NOW_S) == "the job was cancelled"
        assert in_output(written, "12", now_s=NOW_S + 3600) == ""
        assert in_output(line(), "12", now_s=NOW_S) == "the job was cancelled"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_where_the_output_does_not_tell_slurm_is_asked(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1"], state="CANCELLED")
    environ = {**slurm.environ(), "SLURM_JOB_ID": "12"}
    with (tmp_path / "out").open("w+b") as output:
        assert became(environ, now_s=NOW_S, output=output.fileno()) == "the job was cancelled"
        output.write(line(" DUE TO JOB REQUEUE"))
        output.flush()
        assert became(environ, now_s=NOW_S, output=output.fileno()) == "the job was requeued"
        for outside in ({}, {"SLURM_JOB_ID": "13", "PATH": "/nonexistent"}):
            assert became(outside, now_s=NOW_S, output=output.fileno()) == ""
