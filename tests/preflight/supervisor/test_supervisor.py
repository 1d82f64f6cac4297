# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job by what its check says, also where that dies, hangs or is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import msgspec
import pytest

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


@pytest.mark.parametrize("rest", ["", "while :; do sleep 0.1; done"], ids=["after", "during"])
def test_a_requeue_that_ends_the_job_is_no_news(bench: Bench, rest: str) -> None:
    # As the check does: it says what it will ask Slurm for, and Slurm ends both, sooner or later.
    line = json.dumps({"disposition": "requeue", "reason": "n3 is broken"})
    bench.master(f"echo 'job will move' >&2\necho '{line}'\necho told >>$LOG\n{rest}\n")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("told")
    process.send_signal(signal.SIGTERM)
    assert bench.finish(process) == (-signal.SIGTERM, b"", b"job will move\n")


def test_a_requeue_by_a_check_that_died_over_it_is_no_news_to_the_next(bench: Bench) -> None:
    line = json.dumps({"disposition": "requeue", "reason": "n3 is broken"})
    bench.master(
        f"echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] && echo '{line}' && kill -9 $$\n"
        "echo again >>$LOG\nwhile :; do sleep 0.1; done\n"
    )
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("again")
    process.send_signal(signal.SIGTERM)
    code, out, err = bench.finish(process)
    assert (code, out) == (-signal.SIGTERM, b"")
    assert b"killed by SIGKILL" in err
    assert b"SIGTERM" not in err


def test_a_requeue_that_was_refused_is_none_when_a_signal_ends_the_check(bench: Bench) -> None:
    bench.master(
        'echo \'{"disposition": "requeue"}\'\necho \'{"disposition": "stop"}\'\n'
        "echo told >>$LOG\nwhile :; do sleep 0.1; done\n"
    )
    process = bench.supervised("#!/bin/sh\n", options=["--grace-s", "0.3"])
    bench.wait_for("told")
    process.send_signal(signal.SIGTERM)
    assert b"SIGTERM ended the check" in bench.finish(process)[2]


def test_master_that_cannot_be_started_lets_the_script_run_loudly(bench: Bench) -> None:
    (bench.directory / "master").unlink()
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"UNCHECKED" in err


def test_a_check_that_slurm_ends_with_its_job_says_what_becomes_of_that(
    bench: Bench, tmp_path: Path
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1"], state="PENDING")
    bench.master(MASTER_THAT_HANGS)
    environ = {**bench.environ(), **slurm.environ(), "SLURM_JOB_ID": "12"}
    process = bench.supervised("#!/bin/sh\n", options=["--grace-s", "0.3"], environ=environ)
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    said = b"the job was requeued during its check, so the script did not run\n"
    assert said in bench.finish(process)[2]


@pytest.mark.parametrize(
    ("end_s", "said"),
    [
        (
            "1",
            b"the job's time limit ended the check, so the script did not run; ask for more time",
        ),
        ("9999999999", b"SIGTERM ended the check, so the script did not run\n"),
        ("", b"SIGTERM ended the check, so the script did not run; if that was for the time limit"),
    ],
    ids=["over", "not over", "not told"],
)
def test_a_signal_that_ends_the_check_is_named(bench: Bench, end_s: str, said: bytes) -> None:
    bench.master(MASTER_THAT_HANGS)
    environ = {**bench.environ(), "SLURM_JOB_END_TIME": end_s}
    options = ["--grace-s", "0.3"]
    process = bench.supervised("#!/bin/sh\n", options=options, environ=environ)
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    assert said in bench.finish(process)[2]


def test_a_quiet_check_adds_nothing_to_what_the_script_writes(bench: Bench) -> None:
    bench.master("echo it was checked >&2; kill -9 $$\n")
    script = "#!/bin/sh\necho ran; echo failed >&2; exit 7\n"
    loud = bench.finish(bench.supervised(script))
    quiet = bench.finish(bench.supervised(script, options=["--quiet"]))
    assert loud[2] != b"failed\n"
    assert quiet == (7, b"ran\n", b"failed\n")
