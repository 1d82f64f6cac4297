# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a script, by us and by its PyTorch, and that nothing waits for it."""

import os
import signal
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor import monitor_process
from slurm_health.preflight.supervisor.flight_recorder import recording
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal
from tests.support.rows import rows
from tests.support.supervised import Bench, hung_filesystem

ON = ("--flight-recorder",)
SHOWS = "#!/bin/sh\nenv | grep ^TORCH_ | sort\necho ran\n"


@pytest.mark.parametrize(("end", "code", "number"), [("exit 4", 4, 0), ("kill -KILL $$", 137, 9)])
def test_start_and_end_of_the_script_are_recorded(
    bench: Bench, end: str, code: int, number: int
) -> None:
    run = bench.journal()
    bench.finish(bench.supervised(f"#!/bin/sh\necho $$\n{end}\n"))
    started, ended = (entry.record for entry in journal.read_all(run, journal.SUPERVISOR))
    assert isinstance(started, ScriptStarted)
    assert started.script == "train.sh"
    assert isinstance(ended, ScriptEnded)
    assert (ended.exit_code, ended.signal) == (code, number)
    assert ended.duration_s > 0


@pytest.mark.heavy
@pytest.mark.root
def test_journal_that_hangs_holds_up_neither_signals_nor_the_end(bench: Bench) -> None:
    with hung_filesystem(bench) as (run, wrapper, environ):
        bench.answer("proceed", directory=str(run))
        process = bench.supervised(
            "#!/bin/bash\nenv | grep ^TORCH_\ntrap 'exit 6' USR1\necho ready >>$LOG\n"
            "while :; do sleep 0.02; done\n",
            options=(*ON, "--journal-wait-s", "0.2"),
            wrapper=wrapper,
            environ=environ,
        )
        bench.wait_for("ready")
        os.kill(process.pid, signal.SIGUSR1)
        code, out, err = bench.finish(process)
    assert (code, out) == (6, b"")
    assert b"its filesystem does not answer" in err
    assert b"does not record: journal " in err
    assert b"its filesystem did not answer within 0.2 s\n" in err


def test_what_lies_in_the_place_of_the_journal_holds_up_nothing(bench: Bench) -> None:
    os.mkfifo(journal.path_of(bench.journal(), journal.SUPERVISOR))
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"supervisor.jsonl is not a plain file" in err


def test_the_flight_recorder_is_switched_on_where_that_was_asked_for(bench: Bench) -> None:
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    bench.answer("proceed", directory=str(bench.directory / "journal"))
    _, out, err = bench.finish(
        bench.supervised(SHOWS, options=ON, environ={**bench.environ(), **own})
    )

    files = f"{bench.directory}/journal/flight-rank-"
    assert out.decode().splitlines() == [
        f"TORCH_FR_DUMP_TEMP_FILE={files}",
        f"TORCH_NCCL_DEBUG_INFO_TEMP_FILE={files}",
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=7",
        "ran",
    ]
    assert b"--flight-recorder" not in err


def test_a_script_whose_journal_takes_no_pipe_is_told_of_none(tmp_path: Path) -> None:
    pipes, none = (
        recording({"PATH": "/bin"}, str(directory), limit_s=60)
        for directory in (tmp_path, tmp_path / "gone")
    )

    assert monitor_process.PIPES in pipes
    assert none.keys() == pipes.keys() - {monitor_process.PIPES}
    assert list(tmp_path.iterdir()) == []


NAMES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "flight-rank-",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "flight-rank-",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "flight-rank-",
}


@rows
def test_the_names_are_set_that_the_torch_of_the_check_knows_and_the_user_has_not_chosen(
    tmp_path: Path, torch: str, own: list[str], without: set[str]
) -> None:
    (tmp_path / "n1.jsonl").write_text(f'{{"kind": "workers_ready", "torch": "{torch}"}}\n')

    found = recording(dict.fromkeys(own, ""), str(tmp_path), limit_s=60)

    assert {name: value.removeprefix(f"{tmp_path}/") for name, value in found.items()} == {
        name: value for name, value in NAMES.items() if name not in without
    }


@pytest.mark.parametrize("quiet", [(), ("--quiet",)], ids=["a job's output", "the machine's log"])
def test_a_script_runs_without_the_flight_recorder_where_a_file_of_the_journal_cannot_be_read(
    bench: Bench, quiet: tuple[str, ...]
) -> None:
    run = bench.journal()
    (run / "n1.jsonl").mkdir()  # to read it is an error, for root too

    code, out, err = bench.finish(bench.supervised(SHOWS, options=(*ON, *quiet)))

    assert (code, out) == (0, b"ran\n")
    said = f"slurm-health: --flight-recorder: the script's PyTorch does not record: journal {run}: "
    lines = [line for line in err.decode().splitlines() if line.startswith(said)]
    assert [line.count("Is a directory") for line in lines] == ([] if quiet else [1])
    assert b"Traceback" not in err
