# SPDX-License-Identifier: Apache-2.0
"""The sentences about a job, the same in its output, in the report's text, HTML and JSON.

They are made from decoded facts, here and nowhere else; no code reads them back.
"""

from __future__ import annotations

from slurm_health.records.script_records import (
    Attribution,
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.records.text import cut, duration_text, one_line

_EVIDENCE_CHARACTERS = 240
_TOLD = 6  # lines of what nodes told of themselves


def event_text(event: TrainingEvent) -> str:
    """Return what the monitor saw, in one sentence without its cause."""
    stalled = duration_text(event.stalled_s)
    match event.event:
        case EventKind.HANG if event.at_rest:
            return f"all ranks have only waited for {stalled}"
        case EventKind.HANG if event.line:
            return (
                f"no line that counts steps for {stalled}, the last was {event.line!r}, and no"
                " process of the job works"
            )
        case EventKind.HANG:
            return f"no step for {stalled} after step {event.step}"
        case EventKind.HANG_OVER:
            at = f", at step {event.step}" if event.step else ""
            return f"the training goes on after {stalled}{at}"
        case EventKind.STRAGGLER:
            return (
                f"rank {event.ranks[0]} on {event.nodes[0]} is slower than the others:"
                f" {event.took_ms:.0f} ms of its own per step, {event.usual_ms:.0f} ms usual"
            )
        case EventKind.SLOWDOWN:
            return f"a step takes {event.took_ms:.0f} ms instead of {event.usual_ms:.0f} ms"
        case EventKind.UNEVEN:
            return f"the heaviest share of the work takes {event.ratio:.2f} times as long as others"
        case EventKind.LOSS:
            return f"the loss is NaN or infinite: {event.line!r}"


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
