# SPDX-License-Identifier: Apache-2.0
"""What is concluded and decided from fixed inputs is what it was."""

import pytest

from tests.frozen.store import HOME, TABLES, differences, generated

_MOST_SHOWN = 20
# Simulated clusters take half a minute.
_HEAVY = {table: pytest.mark.heavy for table in TABLES if table.startswith("simulated")}


@pytest.mark.parametrize("table", [pytest.param(t, marks=_HEAVY.get(t, ())) for t in TABLES])
def test_what_is_concluded_and_decided_is_as_it_was_frozen(table: str) -> None:
    changed = list(differences(table, generated(table)))

    shown = "\n".join(changed[:_MOST_SHOWN])
    assert not changed, (
        f"{len(changed)} entries of tests/frozen/{table}.json changed, the first are:\n{shown}\n"
        "Where that is wanted, `make freeze` accepts it; say in the commit why."
    )


def test_every_file_of_what_is_frozen_is_compared() -> None:
    assert sorted(path.stem for path in HOME.glob("*.json")) == sorted(TABLES)
