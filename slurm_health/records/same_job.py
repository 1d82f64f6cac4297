# SPDX-License-Identifier: Apache-2.0
"""Which checks below one job id belong to one job: Slurm counts anew after a reset of its state."""

from __future__ import annotations

from slurm_health.records.records import RunStarted


def is_of_another_job(before: RunStarted, after: RunStarted) -> bool:
    """Tell whether a check belongs to another job than one that began before it.

    Checks of one job were submitted at one time; where that is not known, its attempts count
    upwards and each of them has one start.
    """
    if before.submit_time_s is not None and after.submit_time_s is not None:
        return before.submit_time_s != after.submit_time_s
    if before.attempt == after.attempt and None not in (before.start_time_s, after.start_time_s):
        return before.start_time_s != after.start_time_s
    return after.attempt < before.attempt
