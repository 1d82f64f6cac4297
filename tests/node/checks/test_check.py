# SPDX-License-Identifier: Apache-2.0
"""Every check is there under its name, says what it is for, and is documented with its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.node.checks.check import BUILT_IN, find_check


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_check_that_is_named_is_there_and_says_what_it_is_for(name: str) -> None:
    kind = find_check(name)
    assert kind.__doc__
    assert set(kind.CONTEXTS) <= {"prolog", "epilog", "healthcheck", "retest"}


def test_every_check_and_every_setting_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs/admin/checks.md").read_text()
    for name in BUILT_IN:
        assert f"## {name}" in text, name
        section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
        for setting in find_check(name).__struct_fields__:
            assert f"`{setting}`" in section, (name, setting)


def test_every_table_of_the_file_is_documented() -> None:
    from slurm_health.node.rules import settings

    text = (Path(__file__).parents[3] / "docs/admin/configuration.md").read_text()
    for name in (
        "Hooks",
        "Breaker",
        "Recovery",
        "Accusations",
        "Sweep",
        "Default",
        "Metrics",
        "Notify",
        "Repair",
        "CommonKeys",
    ):
        for setting in getattr(settings, name).__struct_fields__:
            assert f"`{setting}`" in text or f".{setting}]`" in text, (name, setting)
