# SPDX-License-Identifier: Apache-2.0
"""A post-mortem says why a script failed, and changes nothing else about the job."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.system import journal
from tests.support.rows import rows
from tests.support.supervised import Bench, eventually, hung_filesystem

RAISES = """#!/bin/bash
echo '[rank1]: Traceback (most recent call last):' >&2
echo "[rank1]: KeyError: 'lr'" >&2
"""
TRAPS = "trap 'exit 0' TERM\necho ready >>$LOG\nwhile :; do read -rt 1 <> <(:); done\n"
# Holds a post-mortem that is this command, and prints what there is to say of it.
HOLDS = """
import os, signal, sys
from slurm_health.preflight.supervisor import post_mortem
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
environ = dict(os.environb)
print(post_mortem.run(sys.argv[2:], environ=environ, mask=mask, limit_s=float(sys.argv[1])))
"""


def holding(limit_s: float, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(limit_s), *argv], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        (RAISES + "exit 3", 3, b"KeyError: 'lr'"),
        (RAISES + "kill -9 $$", -9, b"KeyError: 'lr'"),
        (RAISES + "kill $$", -15, b"KeyError: 'lr'"),
        (
            "#!/bin/bash\necho mine >&2; kill -SEGV $$",
            -11,
            b"crashed (SIGSEGV, a segmentation fault)",
        ),
        ("#!/bin/bash\nkill -9 0", -9, b"was killed by SIGKILL"),
    ],
)
def test_a_failed_script_is_explained_and_ends_as_it_did(
    bench: Bench, script: str, code: int, why: bytes
) -> None:
    ended, _, said = bench.finish(bench.supervised(script))

    assert ended == code
    assert b"slurm-health: post-mortem: why train.sh failed" in said
    assert why in said.partition(b"post-mortem")[2]


@pytest.mark.parametrize("trap", [True, False], ids=["a trap", "no signal here"])
@pytest.mark.parametrize(
    ("due_to", "cause"), [("", "ended-from-outside"), (" DUE TO JOB REQUEUE", "requeued")]
)
def test_a_script_that_ends_well_when_slurm_ends_its_job_is_told_to_have_been_ended(
    bench: Bench, trap: bool, due_to: str, cause: str
) -> None:
    """What ran ends first, and the script goes on; or it writes a checkpoint at the signal."""
    run = bench.journal()
    said = f"*** JOB 12 ON n1 CANCELLED AT $(date +%Y-%m-%dT%H:%M:%S){due_to} ***"
    line = f'echo "slurmstepd-n1: error: {said}" >&2\n'
    environ = {**bench.environ(), "SLURM_JOB_ID": "12"}
    job = bench.supervised(f"#!/bin/bash\n{line}{TRAPS if trap else ''}", environ=environ)
    if trap:
        bench.wait_for("ready")
        os.kill(job.pid, signal.SIGTERM)
    code, _, written = bench.finish(job)

    assert code == 0
    assert b"post-mortem" not in written  # Slurm's own line stands there
    (entry,) = journal.read_all(run, journal.POST_MORTEM)
    assert isinstance(entry.record, Diagnosed)
    assert (entry.record.cause, entry.record.attribution) == (cause, "ended from outside")


def test_a_script_that_ends_well_at_a_signal_of_its_users_is_not_spoken_of(bench: Bench) -> None:
    run = bench.journal()
    job = bench.supervised(RAISES + TRAPS)
    bench.wait_for("ready")
    os.kill(job.pid, signal.SIGTERM)

    code, _, said = bench.finish(job)

    assert code == 0
    assert b"post-mortem" not in said
    assert not (run / f"{journal.POST_MORTEM}.jsonl").exists()


@pytest.mark.root
def test_an_output_that_no_longer_answers_holds_no_job_whose_script_ended_well(
    bench: Bench,
) -> None:
    with hung_filesystem(bench, stderr=True) as (_, wrapper, environ):
        job = bench.supervised(
            "#!/bin/bash\necho written >&2 && echo ran\n",
            wrapper=wrapper,
            environ={**environ, "SLURM_JOB_ID": "12"},
        )
        code, out, _ = bench.finish(job)
        assert (code, out) == (0, b"ran\n")


def test_the_signal_that_ended_the_script_may_come_late_and_ends_no_post_mortem(
    bench: Bench,
) -> None:
    job = bench.supervised(RAISES + "kill $$")
    eventually(lambda: job.poll() is not None or is_held(job.pid), "the post-mortem")
    if job.poll() is None:
        os.kill(job.pid, signal.SIGTERM)

    code, _, said = bench.finish(job)

    assert code == -signal.SIGTERM
    assert b"slurm-health: post-mortem: why train.sh failed" in said


def is_held(supervisor: int) -> bool:
    """Tell whether a post-mortem is a child of a supervisor."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"slurm_health.training.monitor" in words:
                return True
    return False


def test_a_signal_ends_a_post_mortem(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = holding(60.0, "sh", "-c", f"touch {begun}; exec sleep 600")
    eventually(begun.exists, "the post-mortem")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)

    assert said == "the post-mortem was ended by a signal\n"


@rows
def test_a_post_mortem_that_fails_or_hangs_is_named(
    limit_s: float, argv: list[str], said: str
) -> None:
    assert holding(limit_s, *argv).communicate(timeout=60)[0].startswith(said)
