# SPDX-License-Identifier: Apache-2.0

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.allocation import Allocation, from_environ, name_in_slurm
from slurm_health.records.errors import AllocationError, ExitCode
from tests.support.rows import rows

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}
VARIABLES = (
    "SLURM_RESTART_COUNT",
    "SLURM_HET_SIZE",
    "SLURM_JOB_START_TIME",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NODELIST",
)


@rows
def test_what_slurm_sets_is_taken(environ: dict[str, str], allocation: Allocation) -> None:
    assert from_environ(environ) == allocation


@rows
def test_a_task_is_called_by_its_array(environ: dict[str, str], name: str) -> None:
    assert name_in_slurm(environ) == name


def test_outside_a_job_the_error_says_what_to_do_instead() -> None:
    with pytest.raises(AllocationError, match=r"salloc or sbatch first, or --local N") as caught:
        from_environ({})

    assert caught.value.variable == "SLURM_JOB_ID"
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@rows
def test_a_variable_that_cannot_be_used_is_named(changes: Mapping[str, str], variable: str) -> None:
    with pytest.raises(AllocationError) as caught:
        from_environ({**JOB, **changes})

    assert caught.value.variable == variable


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text("0123²٣x(),-[]", max_size=8)))
def test_any_environment_is_an_allocation_or_an_allocation_error(told: dict[str, str]) -> None:
    try:
        allocation = from_environ({**JOB, **told})
    except AllocationError:
        return
    assert allocation.nodes
