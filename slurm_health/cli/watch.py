# SPDX-License-Identifier: Apache-2.0
"""`slurm-health watch`: a job's report that follows what happens, on a terminal."""

from __future__ import annotations

import contextlib
import curses
import logging
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click

from slurm_health.cli.output import print_result, terminal
from slurm_health.cli.shared_options import shared_options
from slurm_health.preflight import config
from slurm_health.preflight.options import Door
from slurm_health.records.errors import ExitCode, RunNotFound
from slurm_health.report import find, read, slurm_now, table
from slurm_health.report.build import job_report
from slurm_health.report.model import JobReport
from slurm_health.report.progress import JobActivity, followed, progress
from slurm_health.report.read import jobs_in

# Each look reads the journal's files once; a person sees no more than one change in a second.
_LOOK_S = 1.0
# Where a look takes long, at a journal of hundreds of megabytes, the rest of the time is others'.
_PAUSES, _LONGEST_PAUSE_S = 4.0, 20.0
# Slurm is asked only about a job without a journal, or whose script has ended, and seldom: it is
# others' too.
_ASK_SLURM_S = 10.0
# While a check or a script runs, whether its job does: who kills both leaves no word of their end.
_ASK_IF_ENDED_S = 30.0
_SILENT = "no journal of it yet, and Slurm cannot be asked about it here"
_QUIT = {ord("q"), ord("Q"), 27}


@click.command(short_help="Follow a check or a job on the terminal while it runs.")
@click.argument("job", metavar="JOBID")
@shared_options(Door.CHECK, "journal")
@click.option("--cluster", metavar="NAME", help="The cluster, where several share the journal.")
def watch(job: str, journal: str | None, cluster: str | None) -> int:
    """Follow a check or a job on the terminal while it runs.

    Shows the report of JOBID, drawn anew every second, below a line that says how far the check has
    got. Ends with the job and leaves the report on the terminal; q or Ctrl-C end it earlier.
    """
    if not sys.stdout.isatty():
        raise click.UsageError(
            f"watch needs a terminal; slurm-health report {job} prints what is known now"
        )
    root = config.journal_root(journal, os.environ)
    tasks = find.tasks_of(root, job, cluster)
    if tasks:
        raise click.UsageError(
            f"{job} is an array; follow one of its tasks: {', '.join(tasks[:5])}"
        )
    look = _Look(root, job, cluster)
    logging.disable(logging.WARNING)  # every look would say the same, across the screen
    try:
        look.again(time.time())  # what is wrong is said before the screen is taken
        if look.report is None and look.state.over:
            raise RunNotFound(job, root, reason=look.state.text)
        curses.wrapper(lambda screen: _follow(screen, look))
    except curses.error as err:
        raise click.UsageError(_cannot_be_drawn(job, str(err), os.environ.get("TERM"))) from None
    except KeyboardInterrupt:
        pass
    finally:
        logging.disable(logging.NOTSET)
    width, unicode = terminal()
    if look.report is None:
        print_result(f"{look.state.text}\n")
    else:
        print_result(table.job_text(look.report, width=width, unicode=unicode).rstrip("\n") + "\n")
    return int(ExitCode.HEALTHY)


def _cannot_be_drawn(job: str, why: str, terminal: str | None) -> str:
    if not terminal:
        why = "the variable TERM does not say what it is; TERM=xterm fits most"
    elif "find terminal" in why:
        why = f"this machine does not know TERM={terminal}; TERM=xterm fits most"
    return (
        f"this terminal cannot be drawn on: {why};"
        f" slurm-health report {job} prints what is known now"
    )


class _Seen(NamedTuple):
    """What a job's journal says at one moment."""

    report: JobReport
    state: JobActivity


def _seen(paths: Sequence[Path], now_s: float) -> _Seen:
    runs = jobs_in([read.read_run(path) for path in paths])[-1]
    return _Seen(job_report(runs, now_s=now_s), progress(followed(runs), now_s))


class _Look:
    """What is known of a job, as of the last look."""

    def __init__(self, root: Path, job: str, cluster: str | None) -> None:
        self._root, self._job, self._cluster = root, job, cluster
        self._asked_s = float("-inf")
        self._waits = ""
        self._runs_on = False
        self._ended = ""
        self._ask_if_ended_s = float("-inf")
        self.report: JobReport | None = None
        self.state = JobActivity("looking")

    def again(self, now_s: float) -> None:
        """Read the journal; ask Slurm where there is none yet."""
        try:
            paths = find.runs_of_job(self._root, self._job, self._cluster)
        except RunNotFound as err:
            if not slurm_now.may_know(err, self._cluster, os.environ):
                raise
            if now_s - self._asked_s >= _ASK_SLURM_S:
                self._asked_s = now_s
                said = slurm_now.word(self._job, os.environ)
                self.state = JobActivity(said.text or _SILENT, over=said.final)
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


def _follow(
    screen: curses.window,
    look: _Look,
    clock: Callable[[], float] = time.time,
) -> None:
    with contextlib.suppress(curses.error):  # not every terminal can
        curses.use_default_colors()
        curses.curs_set(0)
    while True:
        began_s = clock()
        look.again(began_s)
        _draw(screen, look)
        screen.timeout(int(1000 * pause_s(clock() - began_s)))
        if look.state.over or screen.getch() in _QUIT:
            return


def pause_s(look_s: float) -> float:
    """Return for how many seconds to wait after a look that took so many."""
    return min(max(_LOOK_S, _PAUSES * look_s), _LONGEST_PAUSE_S)


def _draw(screen: curses.window, look: _Look) -> None:
    """Fill the screen: the state, the report as far as it fits, and what q does."""
    height, width = screen.getmaxyx()
    _, unicode = terminal()
    heads = textwrap.wrap(look.state.text, max(1, width - 1))
    lines = []
    if look.report is not None:
        told = table.job_text(look.report, width=width - 1, unicode=unicode, followed=True)
        lines = told.splitlines()
    room = max(0, height - len(heads) - 2)
    if len(lines) > room > 0:
        lines = [
            *lines[: room - 1],
            f"{len(lines) - room + 1} more lines; make the terminal taller",
        ]
    screen.erase()
    rows = [(row, text, curses.A_BOLD) for row, text in enumerate(heads)]
    rows += [(row, text, curses.A_NORMAL) for row, text in enumerate(lines, len(heads) + 1)]
    rows.append((height - 1, "q quits; the job is not touched", curses.A_DIM))
    for row, text, style in rows:
        if row < height:
            screen.insnstr(row, 0, text, width - 1, style)
    screen.refresh()
