# SPDX-License-Identifier: Apache-2.0
"""The start and the end of the script are recorded, and nothing waits for that."""

from __future__ import annotations

import os
import signal

import pytest

from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal
from tests.support.supervised import Bench, hung_filesystem


@pytest.mark.parametrize(("end", "code", "number"), [("exit 4", 4, 0), ("kill -KILL $$", 137, 9)])
def test_start_and_end_of_the_script_are_recorded(
    bench: Bench, end: str, code: int, number: int
) -> None:
    run = bench.directory / "run"
    run.mkdir()
    bench.answer("proceed", directory=str(run))
    bench.finish(bench.supervised(f"#!/bin/sh\necho $$\n{end}\n"))
    started, ended = (entry.record for entry in journal.read_all(run, journal.SUPERVISOR))
    assert isinstance(started, ScriptStarted)
    assert started.script == "train.sh"
    assert isinstance(ended, ScriptEnded)
    assert (ended.exit_code, ended.signal) == (code, number)
    assert ended.duration_s > 0


def test_journal_that_cannot_be_written_is_a_line_and_no_more(bench: Bench) -> None:
    bench.answer("proceed", directory="/no/such/run")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"slurm-health: journal /no/such/run" in err
    assert b"Traceback" not in err


@pytest.mark.heavy
@pytest.mark.root
def test_journal_that_hangs_holds_up_neither_signals_nor_the_end(bench: Bench) -> None:
    with hung_filesystem(bench) as (run, wrapper, environ):
        bench.answer("proceed", directory=str(run))
        process = bench.supervised(
            "#!/bin/bash\ntrap 'exit 6' USR1\necho ready >>$LOG\nwhile :; do sleep 0.02; done\n",
            options=["--journal-wait-s", "0.2"],
            wrapper=wrapper,
            environ=environ,
        )
        bench.wait_for("ready")
        os.kill(process.pid, signal.SIGUSR1)
        code, _, err = bench.finish(process)
    assert code == 6
    assert b"its filesystem does not answer" in err


def test_what_lies_in_the_place_of_the_journal_holds_up_nothing(bench: Bench) -> None:
    run = bench.directory / "run"
    run.mkdir()
    os.mkfifo(journal.path_of(run, journal.SUPERVISOR))
    bench.answer("proceed", directory=str(run))
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"supervisor.jsonl is not a plain file" in err
