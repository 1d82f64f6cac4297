# SPDX-License-Identifier: Apache-2.0
"""What went wrong in scripts, as blocks of the report: while they ran, and why they failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_health.records.script_records import Attribution, Diagnosed
from slurm_health.records.text import cut, one_line
from slurm_health.report.layout import Page
from slurm_health.report.model import RunReport
from slurm_health.report.phrases import attempt_text

_EVIDENCE_CHARACTERS = 240
_TOLD = 6  # lines of what nodes told of themselves


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


def lines_of(found: Diagnosed) -> list[tuple[str, str]]:
    """Return titles and sentences, in the order in which a person needs them.

    What was not looked at, or failed, is told only where it may have decided otherwise.
    """
    undecided = is_undecided(found)
    lines = [("first", found.first)] if found.first else []
    lines.append(("cause", f"{found.description} ({whose_text(found)})"))
    lines += [("evidence", cut(line, _EVIDENCE_CHARACTERS)) for line in found.evidence]
    lines += [("told", cut(line, _EVIDENCE_CHARACTERS)) for line in found.told[:_TOLD]]
    if len(found.told) > _TOLD:
        lines.append(("told", f"{len(found.told) - _TOLD} more lines: slurm-health report --json"))
    if found.accused:
        lines.append(("at fault", ", ".join(found.accused)))
    if found.advice:
        lines.append(("advice", found.advice))
    certain = found.sureness == "certain"
    lines += [("failed", cut(text, _EVIDENCE_CHARACTERS)) for text in found.failed if not certain]
    if undecided and found.not_collected and not certain:
        lines.append(("not seen", "; ".join(found.not_collected)))
    return [(title, one_line(text)) for title, text in lines]


def whose_text(found: Diagnosed) -> str:
    """Return whose doing it is, and how sure the cause is: one that is need not tell whose."""
    if is_undecided(found):
        return f"{found.sureness}; whose fault is undecided"
    return f"{found.attribution}, {found.sureness}"


def is_undecided(found: Diagnosed) -> bool:
    """Tell whether nothing says whose doing it is."""
    return found.attribution == Attribution.UNDECIDED.value


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
        yield "hang", each.hang.stood_still
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
    for uneven in run.unevenness:
        yield "uneven", f"the heaviest takes {uneven.times:.2f} times as long as the others"
        yield from lines_of(uneven.found)
    for lost in run.losses:
        yield "loss", lost.line
        yield from lines_of(lost.found)
