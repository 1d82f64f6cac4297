# SPDX-License-Identifier: Apache-2.0
"""The check as a process: heard, given up where it hangs, ended with all that it started."""

import os
import signal
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.check_process import heartbeat
from tests.support.supervised import (
    MASTER_THAT_HANGS,
    MASTER_THAT_WAITS,
    Bench,
    hung_filesystem,
    with_variable,
)


def test_master_has_no_part_in_the_streams_of_the_job(bench: Bench) -> None:
    bench.master('cat >&2; echo warned >&2; echo noise; echo \'{"disposition": "proceed"}\'\n')
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\ncat\n", stdin=b"for the script"))
    assert (code, out, err) == (0, b"for the script", b"warned\n")


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM],
)
def test_signal_during_the_check_leaves_no_process(bench: Bench, number: int) -> None:
    bench.master(MASTER_THAT_HANGS)
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("ready")
    os.kill(process.pid, number)
    code, out, _ = bench.finish(process)
    assert (code, out) == (-number, b"")
    assert with_variable("LOG", str(bench.log)) == []


def test_harmless_signals_during_the_check_change_nothing(bench: Bench) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised("#!/bin/sh\necho ran\n")
    bench.wait_for("ready")
    for number in (signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD):
        os.kill(process.pid, number)
    Path(f"{bench.log}.go").touch()
    assert bench.finish(process)[:2] == (0, b"ran\n")


def test_what_the_master_leaves_behind_is_gone_before_the_script_runs(bench: Bench) -> None:
    bench.master('setsid sleep 1000 >/dev/null &\necho \'{"disposition": "proceed"}\'\n')
    process = bench.supervised("#!/bin/sh\npgrep -fc '^sleep 1000$' -s 0 >/dev/null; echo ran\n")
    assert bench.finish(process)[1] == b"ran\n"
    assert with_variable("LOG", str(bench.log)) == []


MASTER_ON_HUNG_FILESYSTEM = """
echo start >>$LOG
if [ $(wc -l <$LOG) -gt 1 ]; then
    echo '{"disposition": "proceed", "exit_code": 4, "reason": "UNCHECKED: x"}'
    exit 4
fi
setsid bash -c 'trap "echo told >>$LOG; exit" TERM; while :; do sleep 0.05; done' &
echo
exec cat RUN/master.jsonl
"""


@pytest.mark.heavy
@pytest.mark.root
def test_a_check_that_the_kernel_holds_is_given_up_and_what_it_started_is_ended(
    bench: Bench,
) -> None:
    with hung_filesystem(bench) as (run, wrapper, environ):
        bench.master(MASTER_ON_HUNG_FILESYSTEM.replace("RUN", str(run)))
        process = bench.supervised(
            "#!/bin/sh\necho ran >>$LOG\n",
            options=["--silence-s", "1", "--grace-s", "0.5"],
            wrapper=wrapper,
            environ=environ,
        )
        code, _, err = bench.finish(process)
    assert code == 0
    assert bench.lines() == ["start", "told", "start", "ran"]
    assert b"start 1 of 2 of the check: it hangs: no output for 1 s" in err
    assert b"running the script anyway: UNCHECKED" in err


def test_a_check_that_gets_on_says_so_now_and_then_and_not_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times_s = iter([0.0, 9.9, 10.0, 10.0, 11.0, 19.9, 35.0, 35.0, 44.9])
    beat = heartbeat(lambda: next(times_s))
    for _ in range(6):
        beat()
    assert capsys.readouterr().out == "\n\n"


@pytest.mark.heavy
def test_a_check_that_takes_long_and_says_so_is_waited_for(bench: Bench) -> None:
    bench.master(
        "echo start >>$LOG\nfor each in $(seq 20); do sleep 0.2; echo; done\n"
        'echo \'{"disposition": "proceed"}\'\n'
    )
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--silence-s", "3"])
    assert bench.finish(process) == (0, b"ran\n", b"")
    assert bench.lines() == ["start"]
