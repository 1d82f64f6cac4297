# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import logging

from slurm_health.cli.terminal import ProgressLine
from tests.support.command_line import slurm_health


def test_the_line_gives_way_to_what_is_logged_and_leaves_nothing() -> None:
    terminal = io.StringIO()
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


def test_the_line_is_not_drawn_faster_than_anybody_reads() -> None:
    terminal = io.StringIO()
    line = ProgressLine(terminal, monotonic=iter([0.0, 0.1, 0.3]).__next__)

    for text in ("a", "b", "c"):
        line.show(text)

    assert terminal.getvalue() == "\r\x1b[Ka\r\x1b[Kc"


def test_what_the_encoding_of_the_output_does_not_have_is_replaced() -> None:
    whole = slurm_health("docs", "tutorial", environ={"PYTHONIOENCODING": "utf-8"}).stdout
    done = slurm_health("docs", "tutorial", environ={"PYTHONIOENCODING": "ascii"})

    assert (done.code, done.stderr) == (0, "")
    assert "…" in whole
    assert done.stdout == whole.encode("ascii", errors="replace").decode()
