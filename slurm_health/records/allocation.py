# SPDX-License-Identifier: Apache-2.0
"""The allocation of a job, from the variables that Slurm sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_health.records.errors import AllocationError
from slurm_health.records.nodeset import expand
from slurm_health.records.records import RunStarted
from slurm_health.records.text import whole_number


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The allocation of one attempt of one job.

    `attempt` is Slurm's restart count: 0 for the first start, one more after a requeue. `array` is
    the `12_3` form of an array task's id, empty for other jobs. `start_time_s` is the start of this
    attempt, in seconds since the epoch, None if Slurm does not set it.
    """

    job_id: int
    attempt: int
    cluster: str
    partition: str
    nodes: tuple[str, ...]
    array: str = ""
    start_time_s: int | None = None


def from_environ(environ: Mapping[str, str]) -> Allocation:
    """Read an allocation from a job's environment.

    Raises:
        AllocationError: outside a job, in a heterogeneous job, or with a variable that cannot be
            read.
    """
    if "SLURM_JOB_ID" not in environ:
        raise AllocationError(
            "SLURM_JOB_ID",
            "not set, so this is not inside a Slurm job; use salloc or sbatch first,"
            " or --local N to check this machine without Slurm",
        )
    if _integer(environ, "SLURM_HET_SIZE", default="0") > 1:
        raise AllocationError("SLURM_HET_SIZE", "heterogeneous jobs are not supported")
    start = environ.get("SLURM_JOB_START_TIME", "")
    return Allocation(
        job_id=_integer(environ, "SLURM_JOB_ID"),
        attempt=_integer(environ, "SLURM_RESTART_COUNT", default="0"),
        cluster=environ.get("SLURM_CLUSTER_NAME") or "cluster",
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        nodes=_nodes(environ),
        array=_array_task(environ),
        start_time_s=whole_number(start),
    )


def name_in_slurm(environ: Mapping[str, str]) -> str:
    """Return the job's name for Slurm's commands, empty outside of a job.

    A task of an array is `12_3`: its own number may be that of the whole array, and a command with
    that number means every task.
    """
    return _array_task(environ) or environ.get("SLURM_JOB_ID", "")


def _array_task(environ: Mapping[str, str]) -> str:
    array, task = (environ.get(f"SLURM_ARRAY_{part}_ID", "") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else ""


def _nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    nodelist = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    if not nodelist:
        raise AllocationError("SLURM_JOB_NODELIST", "empty or not set although SLURM_JOB_ID is")
    try:
        return expand(nodelist)
    except ValueError as err:
        raise AllocationError("SLURM_JOB_NODELIST", str(err)) from err


def _integer(environ: Mapping[str, str], variable: str, default: str | None = None) -> int:
    value = environ.get(variable) or default or ""
    try:
        return int(value)
    except ValueError:
        raise AllocationError(variable, f"expected a whole number, found {value!r}") from None


def is_of_another_job(before: RunStarted, after: RunStarted) -> bool:
    """Return whether a check belongs to another job than an earlier check.

    Checks of one job have one time of submission. Without it, attempts of one job count upwards,
    and an attempt has one start.
    """
    if before.submit_time_s is not None and after.submit_time_s is not None:
        return before.submit_time_s != after.submit_time_s
    if before.attempt == after.attempt and None not in (before.start_time_s, after.start_time_s):
        return before.start_time_s != after.start_time_s
    return after.attempt < before.attempt
