# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job by what its check says, also where that dies, hangs or is refused."""

import os
import signal
from pathlib import Path

import msgspec

from tests.support.fake_slurm import FakeSlurm
from tests.support.rows import rows
from tests.support.supervised import MASTER_THAT_HANGS, Bench


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """A check, as a shell script with its options, and how the job then ends and what it says."""

    master: str
    options: list[str] = []
    code: int = 0
    out: str = "ran\n"
    says: list[str] = []
    never: list[str] = []
    log: str = ""


@rows
def test_what_a_check_answers_or_does_not_decides_what_becomes_of_the_script(
    bench: Bench, case: Case
) -> None:
    bench.master(case.master)
    process = bench.supervised("#!/bin/sh\necho ran\n", options=case.options)

    code, out, err = bench.finish(process)

    said = err.decode()
    assert (code, out.decode()) == (case.code, case.out)
    assert [words for words in case.says if words not in said] == []
    assert [words for words in case.never if words in said] == []
    assert not case.log or bench.log.read_text() == case.log


class Ended(msgspec.Struct, forbid_unknown_fields=True):
    """A check as a shell script, and what is said when SIGTERM comes; `pending` in a held job."""

    says: list[str]
    never: list[str] = []
    master: str = MASTER_THAT_HANGS
    environ: dict[str, str] = {}
    pending: bool = False


@rows
def test_a_signal_that_ends_the_check_is_named_but_for_that_of_its_own_requeue(
    bench: Bench, tmp_path: Path, case: Ended
) -> None:
    """A check says what it will ask Slurm for, and Slurm ends both, sooner or later."""
    environ = {**bench.environ(), **case.environ}
    if case.pending:
        slurm = FakeSlurm(tmp_path / "slurm")
        slurm.run_job(12, ["n1"], state="PENDING")
        environ |= {**slurm.environ(), "SLURM_JOB_ID": "12"}
    bench.master(case.master)
    process = bench.supervised(
        "#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"], environ=environ
    )
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)

    code, out, err = bench.finish(process)

    said = err.decode()
    assert (code, out) == (-signal.SIGTERM, b"")
    assert [words for words in case.says if words not in said] == []
    assert [words for words in case.never if words in said] == []


def test_master_that_cannot_be_started_lets_the_script_run_loudly(bench: Bench) -> None:
    (bench.directory / "master").unlink()
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"UNCHECKED" in err


def test_a_quiet_check_adds_nothing_to_what_the_script_writes(bench: Bench) -> None:
    bench.master("echo it was checked >&2; kill -9 $$\n")
    script = "#!/bin/sh\necho ran; echo failed >&2; exit 7\n"
    loud = bench.finish(bench.supervised(script))
    quiet = bench.finish(bench.supervised(script, options=["--quiet"]))
    assert loud[2] != b"failed\n"
    assert quiet == (7, b"ran\n", b"failed\n")
