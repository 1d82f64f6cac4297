# SPDX-License-Identifier: Apache-2.0
"""Every check is there under its name, and says what it and each of its settings is for."""

from __future__ import annotations

import msgspec
import pytest

from slurm_health.node.checks.check import BUILT_IN, check_type
from slurm_health.node.rules import settings
from tests.reference_pages import comments


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_check_that_is_named_is_there_and_says_what_it_is_for(name: str) -> None:
    kind = check_type(name)
    assert kind.__doc__
    assert set(kind.CONTEXTS) <= {"prolog", "epilog", "healthcheck", "retest"}
    assert [name for name in kind.__struct_fields__ if not comments(kind).get(name)] == []


@pytest.mark.parametrize(
    "table",
    [
        settings.Hooks,
        settings.Breaker,
        settings.Recovery,
        settings.Accusations,
        settings.Sweep,
        settings.Default,
        settings.Metrics,
        settings.Notify,
        settings.Repair,
        settings.CommonKeys,
    ],
)
def test_every_key_of_the_config_file_says_what_it_is_for(table: type[msgspec.Struct]) -> None:
    assert [name for name in table.__struct_fields__ if not comments(table).get(name)] == []
