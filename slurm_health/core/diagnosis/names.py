# SPDX-License-Identifier: Apache-2.0
"""The names of inferences that operators lead on from, and what they name of failures."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_health.core.diagnosis.rank_failures import RankFailure

SCRIPT_FAILED = "script-failed"
RANK_FAILED = "rank-failed"
RANKS_WAITED = "ranks-waited"
NO_PROGRESS = "no-progress"  # while the script runs
NEVER_ENTERED = "never-entered"
SLOWER_STEPS = "slower-steps"  # while the script runs
SLOWER_RANK = "slower-rank"
OUT_OF_STEP = "rank-out-of-step"

MOST_LINES = 4  # of evidence of one kind; the output has the rest


def ranks_of(failures: Iterable[RankFailure]) -> tuple[int, ...]:
    """Return the ranks that are known, in order."""
    return tuple(sorted({each.rank for each in failures if each.rank is not None}))


def nodes_of(failures: Iterable[RankFailure]) -> tuple[str, ...]:
    """Return the nodes that are known, in order."""
    return tuple(sorted({each.node for each in failures if each.node}))
