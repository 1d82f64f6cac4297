# SPDX-License-Identifier: Apache-2.0
"""A diagnosis in the words that a person reads: what was first, the cause, what to do."""

from __future__ import annotations

from slurm_health.core.diagnosis.inference import Attribution
from slurm_health.core.records import Diagnosed
from slurm_health.core.text import cut, one_line

_EVIDENCE_CHARACTERS = 240


def lines_of(found: Diagnosed) -> list[tuple[str, str]]:
    """Return titles and sentences, in the order in which a person needs them.

    What was not looked at, or failed, is told only where it may have decided otherwise.
    """
    undecided = found.attribution == Attribution.UNDECIDED.value
    lines = [("first", found.first)] if found.first else []
    whose = "fault undecided" if undecided else found.attribution
    lines.append(("cause", f"{found.description} ({whose}; {found.sureness})"))
    lines += [("evidence", cut(line, _EVIDENCE_CHARACTERS)) for line in found.evidence]
    if found.accused:
        lines.append(("at fault", ", ".join(found.accused)))
    if found.advice:
        lines.append(("advice", found.advice))
    certain = found.sureness == "certain"
    lines += [("failed", cut(text, _EVIDENCE_CHARACTERS)) for text in found.failed if not certain]
    if undecided and found.not_collected and not certain:
        lines.append(("not seen", "; ".join(found.not_collected)))
    return [(title, one_line(text)) for title, text in lines]
