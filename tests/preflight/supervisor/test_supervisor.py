# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job by what its check says, also where that dies, hangs or is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.fake_slurm import FakeSlurm
from tests.support.supervised import MASTER_THAT_HANGS, Bench


def test_stop_prints_the_reason_and_ends_with_its_code(bench: Bench) -> None:
    bench.answer("stop", exit_code=9, reason="n3 is broken", directory="")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (9, b"")
    assert b"slurm-health: the job stops: n3 is broken\n" in err


def test_requeue_that_does_not_come_ends_with_a_message(bench: Bench) -> None:
    bench.answer("requeue", exit_code=1, reason="n3 is broken", directory="")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--requeue-wait-s", "0.2"])
    code, out, err = bench.finish(process)
    assert (code, out) == (1, b"")
    assert b"not requeued the job within 0.2 s" in err


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


def test_master_that_is_killed_is_started_again(bench: Bench) -> None:
    bench.master(
        "echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] && kill -9 $$\n"
        'echo \'{"disposition": "proceed"}\'\n'
    )
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert bench.lines() == ["start", "start"]
    assert b"start 1 of 2 of the check: ended without a verdict (killed by SIGKILL)" in err


@pytest.mark.parametrize("death", ["kill -9 $$", "exit 70"])
def test_a_check_that_dies_before_slurm_heard_of_the_requeue_is_started_again(
    bench: Bench, death: str
) -> None:
    bench.master(
        "echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] &&"
        f' echo \'{{"disposition": "requeue"}}\' && {death}\n'
        'echo \'{"disposition": "proceed"}\'\n'
    )
    code, out, _ = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert bench.lines() == ["start", "start"]


@pytest.mark.parametrize(
    ("nodes", "said"), [("", "the script anyway: why"), ('"n1", "n3"', "the script: why")]
)
def test_a_job_that_has_left_its_bad_nodes_behind_does_not_run_anyway(
    bench: Bench, nodes: str, said: str
) -> None:
    answer = f'{{"disposition": "proceed", "exit_code": 1, "reason": "why", "nodes": [{nodes}]}}'
    bench.master(f"echo '{answer}'\n")
    code, _, err = bench.finish(bench.supervised("#!/bin/sh\n"))
    assert (code, f"slurm-health: running {said}\n".encode() in err) == (0, True)


@pytest.mark.parametrize("body", ["kill -9 $$", "exit 3", "echo no JSON", "echo '{\"x\": 1}'"])
def test_master_that_never_answers_lets_the_script_run_loudly(bench: Bench, body: str) -> None:
    bench.master(f'echo "${{1%%=*}}start" >>$LOG\n{body}\n')
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    # The last one is only to record that the others died.
    assert bench.lines() == ["start", "start", "--uncheckedstart"]
    assert b"running the script anyway: UNCHECKED: the check was started 2 times, and " in err


def test_a_job_that_is_not_to_run_unchecked_stops_where_the_check_never_answers(
    bench: Bench,
) -> None:
    bench.master("kill -9 $$\n")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--unchecked-stops"])
    code, out, err = bench.finish(process)
    assert (code, out) == (4, b"")
    assert b"the job stops: UNCHECKED: the check was started 2 times, and " in err


def test_a_check_that_died_is_asked_what_becomes_of_the_job(bench: Bench) -> None:
    line = json.dumps({"disposition": "stop", "exit_code": 4, "reason": "UNCHECKED: it died"})
    bench.master(f"[ $# = 0 ] && kill -9 $$\necho \"$1\" >>$LOG\necho '{line}'\nexit 4\n")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (4, b"")
    assert bench.log.read_text() == (
        "--unchecked=the check was started 2 times, and ended without a verdict"
        " (killed by SIGKILL)\n"
    )
    assert b"the job stops: UNCHECKED: it died\n" in err


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
