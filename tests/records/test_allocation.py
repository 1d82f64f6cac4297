# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.allocation import Allocation, from_environ, name_in_slurm
from slurm_health.records.errors import AllocationError, ExitCode
from tests.cases import cases

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


def test_the_least_that_slurm_sets_is_enough() -> None:
    assert from_environ(JOB) == Allocation(
        job_id=12,
        attempt=0,
        cluster="cluster",
        partition="",
        nodes=("n1", "n2", "n3"),
    )


def test_everything_that_slurm_tells_is_taken() -> None:
    told = {
        **JOB,
        "SLURM_RESTART_COUNT": "2",
        "SLURM_CLUSTER_NAME": "lab",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_ARRAY_JOB_ID": "11",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_START_TIME": "1700000000",
    }

    assert from_environ(told) == Allocation(
        job_id=12,
        attempt=2,
        cluster="lab",
        partition="gpu",
        nodes=("n1", "n2", "n3"),
        array="11_3",
        start_time_s=1_700_000_000,
    )


def test_the_old_name_of_the_node_list_is_known() -> None:
    assert from_environ({"SLURM_JOB_ID": "1", "SLURM_NODELIST": "a,b"}).nodes == ("a", "b")


def test_outside_a_job_the_error_says_what_to_do_instead() -> None:
    with pytest.raises(AllocationError, match=r"salloc or sbatch first, or --local N") as caught:
        from_environ({})

    assert caught.value.variable == "SLURM_JOB_ID"
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


@cases("records/allocation.toml")
def test_a_variable_that_cannot_be_used_is_named(changes: Mapping[str, str], variable: str) -> None:
    with pytest.raises(AllocationError) as caught:
        from_environ({**JOB, **changes})

    assert caught.value.variable == variable


def test_a_task_of_an_array_is_never_called_by_its_own_number() -> None:
    task = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}

    assert name_in_slurm({**JOB, **task}) == "12_3"
    assert name_in_slurm(JOB) == "12"
    assert name_in_slurm({}) == ""


@given(st.dictionaries(st.sampled_from(VARIABLES), st.text("0123²٣x(),-[]", max_size=8)))
def test_any_environment_is_an_allocation_or_an_allocation_error(told: dict[str, str]) -> None:
    try:
        allocation = from_environ({**JOB, **told})
    except AllocationError:
        return
    assert allocation.nodes
