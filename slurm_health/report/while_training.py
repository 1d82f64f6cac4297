# SPDX-License-Identifier: Apache-2.0
"""What the monitor saw while scripts ran, as a block of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_health.report.layout import Page
from slurm_health.report.model import RunReport
from slurm_health.report.phrases import attempt_text
from slurm_health.report.post_mortem import lines_of


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
    for each in run.hangs:
        what = "line that counts steps" if each.hang.line else "step"
        yield "hang", f"no {what} for {each.hang.stalled_s:.0f} s after step {each.hang.step}"
        yield from lines_of(each.hang.found)
        if each.over:
            yield "over", f"it went on by itself after {each.over.stalled_s:.0f} s"
    for longer in run.slowdowns:
        yield "slower", f"a step takes {longer.step_ms:.0f} ms instead of {longer.usual_ms:.0f}"
        yield from lines_of(longer.found)
    for slow in run.stragglers:
        own, usual = f"{slow.own_ms:.0f} ms of its own per step", f"{slow.usual_ms:.0f} ms usual"
        yield "slow", f"rank {slow.rank} on {slow.node}: {own}, {usual}"
        yield from lines_of(slow.found) if slow.found else ()
