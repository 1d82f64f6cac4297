# SPDX-License-Identifier: Apache-2.0
"""What is said of a job that has no journal: what Slurm knows of it."""

from __future__ import annotations

import pytest

from slurm_health.report.without_journal import explain
from slurm_health.system.slurm.parsing import Job

OURS = "#!/bin/sh\nexec python3 -E -P -m slurm_health supervise --check=standard -- x\n"


def job(*states: str, reason: str = "None", **fields: str) -> Job:
    return Job(job_id=12, states=frozenset(states), reason=reason, fields=fields)


@pytest.mark.parametrize(
    ("found", "script", "said"),
    [
        (job("PENDING", reason="Resources"), OURS, "it is pending (Resources): its nodes are"),
        (job("PENDING"), OURS, "it is pending: its nodes are checked when it starts."),
        (job("PENDING"), "#!/bin/sh\ntrue\n", "not submitted with slurm-health sbatch"),
        (job("RUNNING"), "#!/bin/sh\ntrue\n", "nothing was checked (running)"),
        (job("RUNNING", NodeList="n1", StdOut="/a/s.out"), OURS, "Its output, /a/s.out, says why."),
        (job("CANCELLED"), OURS, "it ended before a check began (cancelled)."),
        (job("FAILED"), "", "it ended before a check began (failed)."),
    ],
)
def test_what_slurm_knows_says_why_there_is_no_journal(found: Job, script: str, said: str) -> None:
    assert said in explain(found, script)


def test_a_job_that_never_started_has_no_output_to_look_at() -> None:
    assert "output" not in explain(job("CANCELLED", StdOut="/a/s.out"), OURS)


def test_of_somebody_elses_job_it_is_said_whom_to_ask() -> None:
    bobs = job("RUNNING", UserId="bob(1002)")

    said = explain(bobs, "", uid=1001)

    assert "it is bob's job (running)" in said
    assert "ask bob for `slurm-health report 12`" in said
    assert "bob" not in explain(bobs, OURS, uid=1002)
