# SPDX-License-Identifier: Apache-2.0
"""Which reader of Slurm is used, and what becomes of one that breaks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from slurm_health.records.errors import SlurmError, SlurmTimeoutError
from slurm_health.system.slurm import command
from slurm_health.system.slurm.parsing import JobId
from slurm_health.system.slurm.reads import Reads, mismatch
from tests.cases import cases
from tests.system.slurm.test_reads import DATA

# --- which reader is used ------------------------------------------------------------------------


@cases("system/slurm/reader_choice.toml")
def test_pyslurm_is_used_where_it_fits_and_was_tested(pyslurm: str, slurm: str, said: str) -> None:
    assert said in mismatch(pyslurm, slurm)
    assert bool(said) == bool(mismatch(pyslurm, slurm))


def test_a_pyslurm_that_ends_its_process_is_replaced_by_the_commands_for_good() -> None:
    asked: list[str] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(argv[0])
        if argv[0] == "scontrol":
            return (DATA / "node-idle.txt").read_text()
        # What importing pyslurm does to a process where there is no slurm.conf.
        environ = {"PATH": "/usr/bin:/bin"}
        says = "echo 'fatal: Could not establish a configuration source' >&2; exit 1"
        return command.run(["sh", "-c", says], environ=environ)

    reads = Reads(run, pyslurm=True)

    assert reads.nodes(["n1"])["n1"].state == "IDLE"
    assert reads.nodes(["n1"])["n1"].state == "IDLE"
    assert asked == [sys.executable, "scontrol", "scontrol"]


def test_a_pyslurm_that_hangs_is_not_waited_for_twice() -> None:
    def run(argv: Sequence[str]) -> str:
        raise SlurmTimeoutError(argv, 8)

    with pytest.raises(SlurmTimeoutError):
        Reads(run, pyslurm=True).nodes([])


@pytest.mark.parametrize("job_id", [18, "18_1"], ids=["an id", "a task by name"])
def test_jobs_are_read_through_the_commands_though_pyslurm_is_used(job_id: JobId) -> None:
    ran: list[str] = []

    def run(argv: Sequence[str]) -> str:
        ran.append(argv[0])
        return (DATA / "job-array.txt").read_text()

    Reads(run, pyslurm=True).job(job_id)

    assert ran == ["scontrol"]


@pytest.mark.parametrize("answer", ["", "nonsense", "[1]", '[{"name": "n1"}]', "{}"])
def test_nonsense_from_pyslurms_process_is_an_error(answer: str) -> None:
    with pytest.raises(SlurmError, match="nonsense"):
        Reads(lambda _argv: answer, pyslurm=True).nodes([])
