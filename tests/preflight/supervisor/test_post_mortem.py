# SPDX-License-Identifier: Apache-2.0
"""A post-mortem says why a script failed, and changes nothing else about the job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.system import journal
from tests.support.supervised import Bench, eventually

RAISES = """#!/bin/bash
echo '[rank1]: Traceback (most recent call last):' >&2
echo "[rank1]: KeyError: 'lr'" >&2
"""
# Holds a post-mortem that is this command, and prints what there is to say of it.
HOLDS = """
import os, signal, sys
from slurm_health.preflight.supervisor import post_mortem
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
environ = dict(os.environb)
print(post_mortem.hold(sys.argv[2:], environ=environ, mask=mask, limit_s=float(sys.argv[1])))
"""


def holding(limit_s: float, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(limit_s), *argv], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("kill $$", -15)])
def test_a_failed_script_is_explained_and_ends_as_it_did(bench: Bench, end: str, code: int) -> None:
    ended, _, said = bench.finish(bench.supervised(RAISES + end))

    assert ended == code
    assert b"slurm-health: post-mortem: why train.sh failed" in said
    assert b"KeyError: 'lr'" in said.partition(b"post-mortem")[2]


def test_a_script_that_ends_well_is_not_spoken_of(bench: Bench) -> None:
    code, _, said = bench.finish(bench.supervised("#!/bin/bash\nexit 0\n"))

    assert (code, said) == (0, b"")


def test_what_was_found_is_recorded_in_the_journal(bench: Bench) -> None:
    run = bench.directory / "journal" / "lab" / "12" / "0"
    journal.create(run, [journal.SUPERVISOR])
    bench.answer("proceed", run_directory=str(run))
    bench.finish(bench.supervised(RAISES + "exit 1"))

    (entry,) = journal.read_all(run, journal.POST_MORTEM)
    assert isinstance(entry.record, Diagnosed)
    assert (entry.record.cause, entry.record.ranks) == ("program-error", [1])


def test_a_post_mortem_that_hangs_is_ended_and_named() -> None:
    said, _ = holding(0.2, "sleep", "600").communicate(timeout=60)

    assert said == "no post-mortem: it did not end within 0.2 s\n"


def test_a_signal_ends_a_post_mortem(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = holding(60.0, "sh", "-c", f"touch {begun}; exec sleep 600")
    eventually(begun.exists, "the post-mortem")
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)

    assert said == "the post-mortem was ended by a signal\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/nonexistent"], "no post-mortem: it cannot be started"),
        (["false"], "the post-mortem failed; the job ends as it would"),
        (["true"], ""),
    ],
    ids=["no command", "fails", "well"],
)
def test_a_post_mortem_that_fails_is_named(argv: list[str], said: str) -> None:
    assert holding(60.0, *argv).communicate(timeout=60)[0].startswith(said)
