# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.preflight.supervisor import flight_environ

NEW = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "/journal/0/flight-rank-",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/journal/0/flight-rank-",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def test_every_name_that_torch_has_had_for_it_is_set() -> None:
    assert flight_environ.changes({"PATH": "/bin"}, "/journal/0") == NEW


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ("TORCH_FR_BUFFER_SIZE", {"TORCH_NCCL_TRACE_BUFFER_SIZE"}),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", {"TORCH_FR_DUMP_TEMP_FILE"}),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", set()),
    ],
)
def test_what_the_user_has_chosen_is_not_touched_under_either_name(
    own: str, others: set[str]
) -> None:
    kept = flight_environ.changes({own: ""}, "/journal/0")

    assert kept.keys() == NEW.keys() - {own} - others


@pytest.mark.parametrize(
    ("torch", "without"),
    [
        ("2.13.0+cu130", {"TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
        ("2.8.1", {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"}),
        ("nightly", set()),
    ],
)
def test_a_torch_of_known_version_gets_the_names_that_it_knows(
    torch: str, without: set[str]
) -> None:
    changed = flight_environ.changes({}, "/journal/0", torch)

    assert changed.keys() == NEW.keys() - without
