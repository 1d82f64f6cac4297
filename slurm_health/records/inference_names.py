# SPDX-License-Identifier: Apache-2.0
"""The names of inferences that operators lead on from, and that others know."""

from __future__ import annotations

SCRIPT_FAILED = "script-failed"
REQUEUED = "requeued"  # by others: the job goes on, and nothing failed
HUNG = "hung-until-it-was-ended"
RANK_FAILED = "rank-failed"
RANKS_WAITED = "ranks-waited"
NO_PROGRESS = "no-progress"  # while the script runs
NEVER_ENTERED = "never-entered"
SLOWER_STEPS = "slower-steps"  # while the script runs
SLOWER_RANK = "slower-rank"
OUT_OF_STEP = "rank-out-of-step"

MOST_LINES = 4  # of evidence of one kind; the output has the rest
