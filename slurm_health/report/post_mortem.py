# SPDX-License-Identifier: Apache-2.0
"""What went wrong in scripts, as blocks of the report: while they ran, and why they failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_health.records.script_records import Attribution
from slurm_health.report.layout import Page
from slurm_health.report.model import RunReport
from slurm_health.report.phrases import attempt_text
from slurm_health.report.sentences import event_text, lines_of


def post_mortems(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return why each script failed or was ended, in the order of the attempts."""
    found = [run.post_mortem for run in runs if run.post_mortem]
    outside = all(each.attribution == Attribution.OUTSIDE for each in found)
    rows = [["POST-MORTEM", "", "WHAT ENDED THE SCRIPT" if outside else "WHY THE SCRIPT FAILED"]]
    for run in runs:
        label = attempt_text(run)
        for title, text in lines_of(run.post_mortem) if run.post_mortem else ():
            rows.append([label, title, text])
            label = ""
    return page.table(rows) if len(rows) > 1 else []


def while_training(runs: Sequence[RunReport], page: Page) -> list[str]:
    """Return the hangs and the slow ranks of each script, in the order of the attempts."""
    rows = [["MONITOR", "", "WHILE THE SCRIPT RAN"]]
    for run in runs:
        label = attempt_text(run)
        for title, text in lines_while_training(run):
            rows.append([label, title, text])
            label = ""
    return page.table(rows) if len(rows) > 1 else []


def lines_while_training(run: RunReport) -> Iterator[tuple[str, str]]:
    """Return what was seen while one script ran, each with a title."""
    if run.so_far:
        yield "so far", run.so_far
    for event in run.events:
        yield event.event.value, event_text(event)
        yield from lines_of(event.diagnosed) if event.diagnosed else ()
