# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report` as it is printed for several jobs, and for jobs without a journal."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import write_healthy_run


def test_several_jobs_are_printed_one_after_the_other(tmp_path: Path) -> None:
    for job in ("4", "5"):
        write_healthy_run(tmp_path, job=job)

    both = slurm_health("report", "4", "5", f"--journal={tmp_path}")

    alone = [slurm_health("report", job, f"--journal={tmp_path}").stdout for job in ("4", "5")]
    assert (both.code, both.stderr) == (0, "")
    assert both.stdout == "\n".join(alone)
    assert [text.split()[:2] for text in alone] == [["Job", "4"], ["Job", "5"]]


def test_a_job_that_waits_is_no_error(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, [], state="PENDING", Reason="Resources")
    journal = f"--journal={tmp_path / 'journal'}"

    waits = slurm_health("report", "12", journal, environ=slurm.environ())
    unknown = slurm_health("report", "13", journal, environ=slurm.environ())
    programs = slurm_health("report", "12", "--json", journal, environ=slurm.environ())

    said = "Job 12: it is pending (Resources): its nodes are checked when it starts.\n"
    assert (waits.code, waits.stdout, waits.stderr) == (0, said, "")
    assert (unknown.code, unknown.stdout) == (4, "")
    assert "no journal of job 13" in unknown.stderr
    assert (programs.code, programs.stdout) == (4, "")
