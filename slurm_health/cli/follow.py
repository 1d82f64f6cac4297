# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report --follow`: a job's report, drawn anew on a terminal while the job runs."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from slurm_health.cli.output import print_result, takes_colour, terminal
from slurm_health.records.errors import RunNotFound
from slurm_health.report import find, layout, read, slurm_now, table
from slurm_health.report.build import job_report
from slurm_health.report.model import JobReport
from slurm_health.report.progress import JobActivity, followed, progress
from slurm_health.report.read import jobs_in

# Each refresh reads the journal's files once; a person sees no more than one change in a second.
_REFRESH_S = 1.0
# Reading a journal of hundreds of megabytes takes long; the rest of the time is others'.
_PAUSES, _LONGEST_PAUSE_S = 4.0, 20.0
# Slurm is asked only about a job without a journal, or whose script has ended, and seldom: it is
# others' too.
_ASK_SLURM_S = 10.0
# While a check or a script runs, whether its job does: who kills both leaves no word of their end.
_ASK_IF_ENDED_S = 30.0
_NO_ANSWER = "no journal of it yet, and Slurm cannot be asked about it here"
# The terminal's other screen, without a cursor; what was there before comes back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_CLEAR, _BOLD, _PLAIN = "\x1b[H\x1b[2J", "\x1b[1m", "\x1b[0m"


def follow(root: Path, job: str, cluster: str | None) -> None:
    """Draw the report of a job until the job is over, and leave it on the terminal.

    Raises:
        UsageError: standard output is no terminal, or the job is an array.
        RunNotFound: there is no journal of it, and Slurm expects none.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM", "") in {"", "dumb"}:
        raise click.UsageError(
            "--follow needs a terminal that can be drawn on, with TERM set to its kind;"
            f" slurm-health report {job} prints what is known now"
        )
    if tasks := find.tasks_of(root, job, cluster):
        raise click.UsageError(
            f"{job} is an array; follow one of its tasks: {', '.join(tasks[:5])}"
        )
    view = _JobView(root, job, cluster)
    logging.disable(logging.WARNING)  # every refresh would log the same, across the screen
    try:
        view.refresh(time.time())  # what is wrong is printed before the screen is taken
        if view.report is None and view.state.over:
            raise RunNotFound(job, root, reason=view.state.text)
        with _screen():
            _draw(view)
            while not view.state.over:
                began_s = time.monotonic()
                view.refresh(time.time())
                _draw(view)
                if not view.state.over:
                    time.sleep(pause_s(time.monotonic() - began_s))
    finally:
        logging.disable(logging.NOTSET)
    width, unicode = terminal()
    if view.report is None:
        print_result(f"{view.state.text}\n")
    else:
        text = table.job_text(view.report, width=width, unicode=unicode).rstrip("\n") + "\n"
        print_result(layout.coloured(text) if takes_colour(os.environ) else text)


def pause_s(refresh_s: float) -> float:
    """Return for how many seconds to wait after a refresh that took so many."""
    return min(max(_REFRESH_S, _PAUSES * refresh_s), _LONGEST_PAUSE_S)


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    try:
        print_result(_ENTER)
        yield
    finally:
        print_result(_LEAVE)


def _draw(view: _JobView) -> None:
    """Fill the screen: the state, and the report as far as it fits."""
    width, height = shutil.get_terminal_size()
    _, unicode = terminal()
    heads = textwrap.wrap(view.state.text, max(1, width - 1))[: max(1, height - 1)]
    lines = []
    if view.report is not None:
        text = table.job_text(view.report, width=width - 1, unicode=unicode, followed=True)
        lines = text.splitlines()
    room = max(0, height - len(heads) - 3)
    if len(lines) > room:
        rest = f"{len(lines) - room + 1} more lines; make the terminal taller"
        lines = [*lines[: max(0, room - 1)], rest]
    text = "\n".join(lines)
    if takes_colour(os.environ):
        text = layout.coloured(text)
    foot = "Ctrl-C ends this; the job is not touched"
    print_result("".join([_CLEAR, _BOLD, "\n".join(heads), _PLAIN, "\n\n", text, "\n", foot]))


class _Seen(NamedTuple):
    """What a job's journal says at one moment."""

    report: JobReport
    state: JobActivity


def _seen(paths: Sequence[Path], now_s: float) -> _Seen:
    runs = jobs_in([read.read_run(path) for path in paths])[-1]
    return _Seen(job_report(runs, now_s=now_s), progress(followed(runs), now_s))


class _JobView:
    """What is known of a job, as it was read last."""

    def __init__(self, root: Path, job: str, cluster: str | None) -> None:
        self._root, self._job, self._cluster = root, job, cluster
        self._asked_s = float("-inf")
        self._waits = ""
        self._runs_on = False
        self._ended = ""
        self._ask_if_ended_s = float("-inf")
        self.report: JobReport | None = None
        self.state = JobActivity("looking")

    def refresh(self, now_s: float) -> None:
        """Read the journal; ask Slurm where there is none yet."""
        try:
            paths = find.runs_of_job(self._root, self._job, self._cluster)
        except RunNotFound as err:
            if not slurm_now.may_know(err, self._cluster, os.environ):
                raise
            if now_s - self._asked_s >= _ASK_SLURM_S:
                self._asked_s = now_s
                said = slurm_now.word(self._job, os.environ)
                self.state = JobActivity(said.text or _NO_ANSWER, over=said.final)
            return
        seen = read.guarded(paths[0].parent, lambda: _seen(paths, now_s), _Seen)
        self.report, self.state = seen.report, seen.state
        if not self.state.over:
            self._waits = ""
            self._look_if_ended(self.report, now_s)
            return
        if now_s - self._asked_s >= _ASK_SLURM_S:
            self._asked_s = now_s
            self._waits = self._waits_again(self.report, now_s)
            self._runs_on = not self._waits and slurm_now.runs_on(
                self.report, now_s=now_s, environ=os.environ
            )
        if self._runs_on:  # what ended the script is looked into; it may be started again
            self.state = JobActivity(f"{self.state.text}; the job is running")
        if self._waits:
            self.report = replace(self.report, waits=self._waits)
            self.state = JobActivity(f"{self.state.text}; the job is {self._waits}")

    def _look_if_ended(self, report: JobReport, now_s: float) -> None:
        """Ask Slurm whether the job of what runs has ended; believe it the second time.

        What the job wrote last may come later than Slurm's word.
        """
        if now_s < self._ask_if_ended_s:
            return
        told = slurm_now.with_unseen_end(report, now_s=now_s, environ=os.environ)
        if told.ended and self._ended:
            self.report, self.state = told, JobActivity(told.ended, over=True)
        self._ended = told.ended
        self._ask_if_ended_s = now_s + (_ASK_SLURM_S if told.ended else _ASK_IF_ENDED_S)

    def _waits_again(self, report: JobReport, now_s: float) -> str:
        """Return what Slurm says of a job that was requeued, empty where it has ended."""
        waits = slurm_now.waiting_again(report, now_s=now_s, environ=os.environ).waits
        if waits or not self._waits:
            return waits
        # It waited before: its next attempt may have begun, and written nothing yet.
        ended = slurm_now.word(self._job, os.environ).final
        return "" if ended else "about to start again"
