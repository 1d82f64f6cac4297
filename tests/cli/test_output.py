# SPDX-License-Identifier: Apache-2.0

import io
import logging
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.cli.output import ProgressLine
from tests.cli.terminal import terminal
from tests.support.command_line import COMMAND, one_line, slurm_health
from tests.support.journals import write_requeued_job


def test_a_full_disk_is_told_in_a_line() -> None:
    with Path("/dev/full").open("wb") as full:
        argv = [*COMMAND, "templates"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert done.returncode == 4
    assert "standard output cannot be written: No space left on device" in one_line(done.stderr)
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    """Keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_the_line_gives_way_to_what_is_logged_and_leaves_nothing() -> None:
    terminal = Terminal()
    line = ProgressLine(terminal, monotonic=iter(range(100)).__next__)
    handler = logging.StreamHandler(terminal)
    handler.addFilter(line)

    line.show("waiting for round 0")
    handler.handle(logging.makeLogRecord({"msg": "round 1"}))
    line.show("waiting for round 1")
    line.erase()
    line.erase()

    erase = "\r\x1b[K"
    assert terminal.getvalue() == (
        f"{erase}waiting for round 0{erase}round 1\n{erase}waiting for round 1{erase}"
    )

    shown = Terminal()  # it is not drawn faster than anybody reads
    quick = ProgressLine(shown, monotonic=iter([0.0, 0.1, 0.3]).__next__)
    for text in ("a", "b", "c"):
        quick.show(text)
    assert shown.getvalue() == "\r\x1b[Ka\r\x1b[Kc"


def test_what_the_encoding_of_the_output_does_not_have_is_replaced(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    words = ("report", "12", f"--journal={tmp_path}")
    whole = slurm_health(*words, environ={"PYTHONIOENCODING": "utf-8"}).stdout
    done = slurm_health(*words, environ={"PYTHONIOENCODING": "ascii", "LC_ALL": "C.UTF-8"})

    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout) > len(whole) / 2


def shown_on_a_terminal(words: list[str], environ: Mapping[str, str]) -> str:
    with terminal(*words, environ=environ, columns=60) as process:
        process.read_to_the_end(0)
    return process.drawn.replace("\r\n", "\n")


TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "LC_ALL": "C.UTF-8", "COLUMNS": ""}


def test_a_terminal_gets_colours_and_its_width_is_kept_to(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    shown = shown_on_a_terminal(["report", "12", f"--journal={tmp_path}"], TERMINAL)

    assert "\x1b[1;31mfaulty\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 60


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_colour_is_only_where_it_is_wanted(tmp_path: Path, environ: Mapping[str, str]) -> None:
    write_requeued_job(tmp_path)
    words = ["report", "12", f"--journal={tmp_path}"]

    assert "\x1b" not in shown_on_a_terminal(words, {**TERMINAL, **environ})
    assert "\x1b" not in slurm_health(*words, environ=TERMINAL).stdout


def test_a_terminal_without_utf_8_gets_ascii(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    environ = {**TERMINAL, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    assert shown_on_a_terminal(["report", "12", f"--journal={tmp_path}"], environ).isascii()
