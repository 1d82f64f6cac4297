# SPDX-License-Identifier: Apache-2.0
"""Flight Recorder dumps of trainings in which ranks were made to fail.

A case is an injected rank: named, or not. A directory holds the dumps of one training and
`fault_injection.log`, whose first line lists the ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.replay.source import Score, Source
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps

_TRUTH = "fault_injection.log"
_YEARS_S = 50 * 365 * 86400.0  # dumps of any age


def score(directory: Path) -> Score:
    """Read each training's dumps, and compare who is named with who was made to fail."""
    score = Score()
    for truth in sorted(directory.glob(f"*/{_TRUTH}")):
        first = truth.read_text().partition("\n")[0]
        injected = {int(rank) for rank in re.findall(r"\d+", first)}
        named = _named(truth.parent)
        score.right += len(injected & named)
        score.undecided += 0 if named else len(injected)
        score.wrong += len(injected - named) if named else 0
        score.innocent += len(named - injected)
        if named != injected:
            score.missed.append(f"{truth.parent.name}: {sorted(named)}, truth {sorted(injected)}")
    return score


def _named(directory: Path) -> set[int]:
    job = EndedJob(
        end=ScriptEnd(exit_code=1),
        node="n1",
        directory=directory,
        environ={"TORCH_FR_DUMP_TEMP_FILE": str(directory / "_dump_")},
        ended_s=max(path.stat().st_mtime for path in directory.iterdir()),
        duration_s=_YEARS_S,
    )
    difference = CollectiveState(FlightDumps(job).collect_data().records).difference
    return set(difference.ranks) if difference else set()


SOURCES = (
    Source(
        name="nvidia-resiliency-ext",
        place="tests/attribution/unit/fr_traces",
        anchor="7 of 8 by its own tool",
        seen=True,
        score=score,
    ),
)
