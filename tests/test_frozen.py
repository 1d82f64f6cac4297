# SPDX-License-Identifier: Apache-2.0
"""What is concluded and decided from fixed inputs is what it was."""

import pytest

from tests.frozen.store import HOME, TABLES, differences, generated

_MOST_SHOWN = 20


@pytest.mark.parametrize("table", TABLES)
def test_what_is_concluded_and_decided_is_as_it_was_frozen(table: str) -> None:
    changed = list(differences(table, generated(table)))

    shown = "\n".join(changed[:_MOST_SHOWN])
    assert not changed, (
        f"{len(changed)} entries of tests/frozen/{table}.json changed, the first are:\n{shown}\n"
        "Where that is wanted, `make freeze` accepts it; say in the commit why."
    )


def test_every_file_of_what_is_frozen_is_compared() -> None:
    assert sorted(path.stem for path in HOME.glob("*.json")) == sorted(TABLES)
