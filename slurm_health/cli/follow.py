# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report --follow`: a job's report, drawn anew on a terminal while the job runs."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import msgspec

from slurm_health.cli.output import page_here, print_result
from slurm_health.records.errors import RunNotFound
from slurm_health.report import find, read, slurm_now, text
from slurm_health.report.story import State, Story

# Each refresh reads the journal's files once; a person sees no more than one change in a second.
_REFRESH_S = 1.0
# Reading a journal of hundreds of megabytes takes long; the rest of the time is others'.
_PAUSES = 4.0
# Slurm is asked seldom: it is others' too.
_ASK_SLURM_S = 15.0
_NO_ANSWER = "no journal of it yet, and Slurm cannot be asked about it here"
# The terminal's other screen, without a cursor; what was there before comes back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_CLEAR = "\x1b[H\x1b[2J"
_SCRIPT_S = 10.0


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
        if view.story is None and view.over:
            raise RunNotFound(job, root, reason=view.word)
        try:
            print_result(_ENTER)
            _draw(view)
            while not view.over:
                began_s = time.monotonic()
                view.refresh(time.time())
                _draw(view)
                if not view.over:
                    time.sleep(max(_REFRESH_S, _PAUSES * (time.monotonic() - began_s)))
        except KeyboardInterrupt:
            sys.exit(130)  # as the last line of the screen says
        finally:
            print_result(_LEAVE)
    finally:
        logging.disable(logging.NOTSET)
    shown = view.word if view.story is None else text.job_text(view.story, page_here())
    print_result(f"{shown}\n")


def _draw(view: _JobView) -> None:
    """Fill the screen with the report as far as it fits."""
    width, height = shutil.get_terminal_size()
    page = replace(page_here(), width=width - 1)
    if view.story is None:
        lines = page.paragraph(view.word)
    else:
        lines = text.job_text(view.story, page, followed=True).splitlines()
    room = max(1, height - 3)
    if len(lines) > room:
        rest = f"{len(lines) - room + 1} more lines; make the terminal taller"
        lines = [*lines[: room - 1], rest]
    foot = "Ctrl-C ends this; the job is not touched"
    print_result("".join([_CLEAR, "\n".join(lines), "\n\n", foot]))


class _JobView:
    """What is known of a job, as it was read last; `word` is Slurm's on one without a journal."""

    def __init__(self, root: Path, job: str, cluster: str | None) -> None:
        self._root, self._job, self._cluster = root, job, cluster
        self._ask_s = float("-inf")
        self._slurm: Story | None = None
        self._doubtful = False
        self.story: Story | None = None
        self.word = "looking"
        self.over = False

    def refresh(self, now_s: float) -> None:
        """Read the journal, and now and then ask Slurm about the job."""
        asks = now_s >= self._ask_s
        if asks:
            self._ask_s = now_s + _ASK_SLURM_S
        try:
            story = read.load(self._root, self._job, cluster=self._cluster, now_s=now_s)
        except RunNotFound as err:
            if not slurm_now.may_know(err, self._cluster, os.environ):
                raise
            if asks:
                word = slurm_now.word(self._job, os.environ)
                self.word, self.over = word.text or _NO_ANSWER, word.final
            return
        runs = story.training.script_runs or story.last.state is State.RUNNING
        if asks:
            answer = slurm_now.asked(story, now_s=now_s, environ=os.environ)
            # What the job wrote last may be seen later than Slurm's answer: an end that nothing
            # recorded is believed the second time.
            doubtful = bool(answer.ended) and runs and not self._doubtful
            self._doubtful, self._slurm = doubtful, None if doubtful else answer
            if not doubtful:
                story = answer
        elif self._slurm is not None:
            story = msgspec.structs.replace(
                story,
                slurm_state=self._slurm.slurm_state,
                over_in_slurm=self._slurm.over_in_slurm,
                waits="" if runs else self._slurm.waits,
                out_of_use=self._slurm.out_of_use,
            )
        self.story, self.over = story, _is_over(story, now_s)


def _is_over(story: Story, now_s: float) -> bool:
    """Tell whether nothing more will come of a job."""
    run, last = story.training, story.last
    if story.ended or last.disposition == "stop":
        return True
    if run.script_runs or last.state is State.RUNNING or story.over_in_slurm is False:
        return False
    if last.disposition == "requeue":
        return story.over_in_slurm is True
    if run.script is not None:
        return True
    # The script of a job begins soon after its check; a check by hand has none.
    ended_s = max((phase.end_s for phase in last.life), default=0.0)
    return last.state is not State.NOT_STARTED and now_s - ended_s > _SCRIPT_S
