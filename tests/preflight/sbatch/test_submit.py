# SPDX-License-Identifier: Apache-2.0
"""What sbatch is given, what is left to it, and what happens while it waits."""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.sbatch import script as batch_script
from slurm_health.records.errors import SlurmCommandMissing, UsageError
from slurm_health.system.slurm import command
from tests.preflight.sbatch.desk import FAKE, SCRIPT, Desk, inside, launcher_spec, launcher_words
from tests.support.command_line import COMMAND
from tests.support.full_filesystem import NO_LARGE_FILES
from tests.support.rows import rows
from tests.support.stranger import as_stranger
from tests.support.supervised import eventually, write_executable


def test_script_goes_in_a_file_of_the_same_name(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    assert desk.submit("-N", "2", "--part=gpu", "./train.sh", "a b", "--check=off") == 0
    options, path, arguments = desk.words[:3], Path(desk.words[3]), desk.words[4:]
    assert options == ["-N", "2", "--part=gpu"]
    assert path.name == "train.sh"
    assert arguments == ["a b", "--check=off"]
    assert inside(desk.text) == SCRIPT
    assert not path.parent.exists()
    assert capfd.readouterr() == ("Submitted batch job 12\n", "sbatch: a word on stderr\n")
    assert launcher_spec(desk.text).submit_time_s == 1_700_000_000
    assert "--script-name=train.sh" in launcher_words(desk.text)


@pytest.mark.root
@rows
def test_a_directory_that_is_closed_to_the_user_ends_in_a_sentence(
    words: list[str], said: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o777)
        closed = place / "closed"
        closed.mkdir(mode=0o700)
        write_executable(place / "sbatch", FAKE)
        (place / "train.sh").write_bytes(SCRIPT)
        environ = {"PATH": f"{place}:{closed}:/usr/bin", "FAKE_RECORD": f"{place}/record"}
        environ |= {"HOME": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [word.format(closed=closed) for word in words]
        done = as_stranger("sbatch", *argv, environ=environ, cwd=place)
    assert said.format(closed=closed) in done.stderr
    assert "Traceback" not in done.stderr


def test_environment_of_sbatch_is_ours(desk: Desk) -> None:
    desk.submit("train.sh", SBATCH_PARTITION="x", SLURM_HEALTH_MAX_REQUEUES="1")
    ours = {os.fsencode(key): os.fsencode(value) for key, value in desk.environ.items()}
    given = desk.environment
    given.pop(b"LC_CTYPE", None)  # of the Python that plays sbatch
    given.pop(os.fsencode(command.CALLED))  # it may be a wrapper: it is no compiled program
    assert given == ours | {b"SBATCH_PARTITION": b"x", b"SLURM_HEALTH_MAX_REQUEUES": b"1"}


def test_script_on_standard_input_stays_there(desk: Desk) -> None:
    assert desk.submit("-N2", stdin=SCRIPT) == 0
    assert desk.words == ["-N2"]
    assert inside(desk.text) == SCRIPT


@pytest.mark.parametrize("words", [["--wrap=echo 'a  b'"], ["--wrap", "echo 'a  b'"]])
def test_wrap_becomes_the_script_that_sbatch_makes(desk: Desk, words: list[str]) -> None:
    assert desk.submit("-N2", *words, "-H") == 0
    assert desk.words == ["-N2", "-H"]
    assert inside(desk.text) == batch_script.wrapped(b"echo 'a  b'")
    assert desk.text.split(b"\n")[1] == b"#SBATCH --job-name=wrap"


def test_script_is_searched_as_sbatch_does(desk: Desk, tmp_path: Path) -> None:
    for place in ("elsewhere", "bin"):
        (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / "bin" / "onpath.sh").write_bytes(b"#!/bin/sh\necho path\n")
    (tmp_path / "elsewhere" / "train.sh").write_bytes(b"#!/bin/sh\necho elsewhere\n")
    desk.submit("onpath.sh")
    assert inside(desk.text) == b"#!/bin/sh\necho path\n"
    desk.submit("-D", "../elsewhere", "train.sh")
    assert inside(desk.text) == b"#!/bin/sh\necho elsewhere\n"
    desk.submit("-D", "../elsewhere", "./train.sh")
    assert inside(desk.text) == SCRIPT


def test_script_from_a_pipe_is_read_once(desk: Desk) -> None:
    for check in ("standard", "off"):
        fifo = desk.directory / f"pipe-{check}"
        os.mkfifo(fifo)
        script = b"#!/bin/sh\n#HEALTH --check=" + check.encode() + b"\necho\n"
        writer = threading.Thread(target=fifo.write_bytes, args=[script])
        writer.start()
        assert desk.submit(str(fifo)) == 0
        writer.join()
        assert Path(desk.words[0]).name == fifo.name
        assert (desk.text == script) is (check == "off")


@rows
def test_check_off_is_plain_sbatch(desk: Desk, words: list[str], extra: Mapping[str, Any]) -> None:
    assert desk.submit(*words, **extra) == 0
    assert desk.words == [word for word in words if word != "--check=off"] + (
        ["--check=off"] if words[-1] == "--check=off" else []
    )


def test_check_off_in_the_script_is_plain_sbatch(desk: Desk) -> None:
    script = b"#!/bin/sh\n#SBATCH hetjob\n#HEALTH --check=off\n"
    (desk.directory / "off.sh").write_bytes(script)
    assert desk.submit("off.sh") == 0
    assert desk.words == ["off.sh"]
    assert desk.submit(stdin=script) == 0
    assert (desk.words, desk.text) == ([], script)


@pytest.mark.parametrize(
    "script", [b"", b"\n \n", b"echo\n", b"#!/bin/sh\n\0\n", b"#!/bin/sh\r\necho\r\n"]
)
@pytest.mark.parametrize("code", [0, 1])
def test_what_sbatch_refuses_it_is_given_as_it_is(
    desk: Desk, script: bytes, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (desk.directory / "bad.sh").write_bytes(script)
    assert desk.submit("-N2", "bad.sh", "a", FAKE_CODE=str(code)) == code
    assert desk.words == ["-N2", "bad.sh", "a"]
    assert desk.text == script
    assert ("UNCHECKED" in capfd.readouterr().err) is (code == 0)
    assert desk.submit("-N2", stdin=script, FAKE_CODE=str(code)) == code
    assert (desk.words, desk.text) == (["-N2"], script)


@rows
def test_what_submits_no_script_or_is_refused_goes_straight_to_sbatch(
    desk: Desk, words: list[str], code: int
) -> None:
    assert desk.submit(*words, FAKE_CODE=str(code)) == code
    assert desk.words == words


def test_missing_sbatch_is_named(desk: Desk) -> None:
    with pytest.raises(SlurmCommandMissing, match="sbatch not found"):
        desk.submit("train.sh", PATH="/nowhere")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["-N1", ":", "-N2", "train.sh"], b""),
        (["het.sh"], b"#SBATCH hetjob"),
        (["het.sh"], b"#SBATCH  PackJob -N2"),
    ],
)
def test_heterogeneous_job_is_refused(desk: Desk, words: list[str], line: bytes) -> None:
    (desk.directory / "het.sh").write_bytes(b"#!/bin/sh\n#SBATCH -N1\n" + line + b"\nx\n")
    with pytest.raises(UsageError, match="heterogeneous job"):
        desk.submit(*words)
    assert not desk.called


@pytest.mark.parametrize(
    "script",
    [
        b"#!/bin/sh",
        b"#!/bin/sh\nprintf '\r'\n",
        b"#!/bin/sh\n#SBATCH --job-name=hetjob\n# hetjob\ntrue\n#SBATCH hetjob\n",
    ],
)
def test_what_looks_like_a_script_that_sbatch_refuses_is_checked(desk: Desk, script: bytes) -> None:
    assert desk.submit(stdin=script) == 0
    assert inside(desk.text) == script


def test_dry_run_prints_and_submits_nothing(
    desk: Desk, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert desk.submit("--dry-run", "-N2", "train.sh", PATH="/nowhere") == 0
    assert inside(capfdbinary.readouterr().out) == SCRIPT
    assert not desk.called


@pytest.mark.parametrize("words", [["--external"], ["missing.sh"], ["--bogus"], ["bad.sh"]])
def test_dry_run_never_submits(desk: Desk, words: list[str]) -> None:
    (desk.directory / "bad.sh").write_text("echo\n")
    with pytest.raises(UsageError, match="--dry-run"):
        desk.submit("--dry-run", *words)
    assert not desk.called


@pytest.mark.parametrize("python_path", ["", "/other", str(Path(batch_script.__file__).parents[3])])
def test_foreign_python_variables_are_ignored_unless_we_are_found_through_them(
    desk: Desk, python_path: str
) -> None:
    desk.submit("train.sh", PYTHONPATH=python_path)
    ignored = not python_path or python_path == "/other"
    assert (b"/python -E -P -m slurm_health" in desk.text) is ignored
    assert b"-P -m slurm_health" in desk.text


def test_a_script_that_no_temporary_directory_takes_is_an_error(desk: Desk) -> None:
    (desk.directory / "train.sh").write_bytes(SCRIPT + b"\n# padding" * 1000)
    done = subprocess.run(
        [*NO_LARGE_FILES, *COMMAND, "sbatch", "train.sh"],
        env=desk.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, desk.called) == (4, "", False)
    assert done.stderr == (
        "slurm-health: train.sh: no temporary directory takes a copy of it: File too large;"
        " set TMPDIR to a directory with room\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_sbatch_and_leaves_no_file(
    desk: Desk, tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [*COMMAND, "sbatch", "--wait", "train.sh"],
        env={**desk.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(Path(f"{desk.record}.ready").exists, "sbatch to wait")
        assert len(list(temporary.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
        assert list(temporary.iterdir()) == []
    finally:
        process.kill()
        process.wait()
