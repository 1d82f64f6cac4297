# SPDX-License-Identifier: Apache-2.0
"""Programs of a site: what their exit codes mean, and what they are given."""

from __future__ import annotations

from pathlib import Path

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.external import Command, Nhc, ProgramRun
from slurm_health.node.rules.finding import Status
from tests.cases import cases
from tests.node.checks.conftest import find_out


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@cases("node/checks/external.toml")
def test_an_exit_code_means_what_the_table_says_and_nothing_else(
    tmp_path: Path, code: int, status: Status
) -> None:
    check = Command(
        argv=(script(tmp_path, f"echo found it; exit {code}"),),
        user_fault_codes=(5,),
        warn_codes=(6,),
    )
    found = find_out(check, CheckContext(environ={}))
    assert found.status is status
    assert "found it" in found.text


def test_a_program_sees_a_path_and_slurms_variables_and_no_others(tmp_path: Path) -> None:
    check = Command(argv=(script(tmp_path, "echo $PATH $SLURM_JOB_ID $LD_PRELOAD_X"),))
    context = CheckContext(environ={"SLURM_JOB_ID": "7", "LD_PRELOAD_X": "evil", "PATH": "/evil"})
    assert find_out(check, context).text.endswith("/usr/sbin:/usr/bin:/sbin:/bin 7")


@cases("node/checks/external.toml")
def test_nhc_convicts_only_by_its_own_word(code: int, output: str, status: Status) -> None:
    assert Nhc().judge(ProgramRun(code=code, output=output)).status is status
