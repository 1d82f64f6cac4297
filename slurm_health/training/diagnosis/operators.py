# SPDX-License-Identifier: Apache-2.0
"""The built-in operators, which need one kind of data, and infer nothing without it.

From `script-failed`, the symptom, to causes by Slurm, kernel and driver, and to `rank-failed`, the
first failure; from there to its meaning. If all failures are consequences, from `ranks-waited` to
the waits of the ranks. From `slower-steps` to a slow link; from `slower-rank` to its cause.
"""

from __future__ import annotations

from slurm_health.records.script_records import (
    RANK_FAILED,
    RANKS_WAITED,
    SCRIPT_FAILED,
    SLOWER_RANK,
    SLOWER_STEPS,
)
from slurm_health.training.diagnosis import (
    failed,
    pace,
    surroundings,
    waits,
)
from slurm_health.training.framework import Rule

_ENDED = (SCRIPT_FAILED, RANK_FAILED)
OPERATORS: tuple[Rule, ...] = tuple(
    Rule(name, leads_on_from, cause)
    for name, leads_on_from, cause in (
        ("slurm-ended-it", (SCRIPT_FAILED,), surroundings.ended_from_outside),
        ("slurm-lost-a-node", (SCRIPT_FAILED,), surroundings.lost_node),
        ("slurm-names-a-node", (SCRIPT_FAILED,), surroundings.slurm_names_a_node),
        ("memory-events", (SCRIPT_FAILED,), surroundings.killed_for_memory),
        ("xid", (SCRIPT_FAILED,), surroundings.gpu_errors),
        ("kernel", (SCRIPT_FAILED,), surroundings.broken_hardware),
        ("monitor-ended-it", (SCRIPT_FAILED,), surroundings.hung_until_ended),
        ("monitor", (*_ENDED, RANKS_WAITED), surroundings.hung_before_failure),
        ("collectives", (SCRIPT_FAILED, RANKS_WAITED), waits.ranks_parted),
        ("first-failure", (SCRIPT_FAILED,), failed.first_failure),
        ("words", (RANK_FAILED,), failed.why_rank_failed),
        ("last-words", (SCRIPT_FAILED,), failed.last_words),
        ("script-crashed", (SCRIPT_FAILED,), failed.script_crashed),
        ("nccl-warnings", (SCRIPT_FAILED,), waits.warned_of_connections),
        ("words-of-waiting", (RANKS_WAITED,), waits.why_ranks_waited),
        ("connection-speeds", (SLOWER_STEPS,), pace.slow_paths),
        ("step-costs", (SLOWER_RANK,), pace.why_slower),
    )
)
