# SPDX-License-Identifier: Apache-2.0
"""Tables of tests that are data: what is given, and what is to come of it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec
import pytest

TABLES = Path(__file__).parent / "data" / "tables"
Test = TypeVar("Test", bound=Callable[..., None])


def cases(file: str) -> Callable[[Test], Test]:
    """Run a test for each row of the table of its name in a file.

    A row has the test's arguments by name, in the form of JSON; what it lacks is None or empty.
    """

    def mark(test: Test) -> Test:
        kinds = get_type_hints(test)
        rows = tomllib.loads((TABLES / file).read_text())[test.__name__.removeprefix("test_")]
        names = [name for name in kinds if any(name in row for row in rows)]
        values = [
            pytest.param(*(_value(row, name, kinds[name]) for name in names), id=_name(row))
            for row in rows
        ]
        marked: Test = pytest.mark.parametrize(names, values)(test)
        return marked

    return mark


def _name(row: dict[str, Any]) -> str:
    """Return the row's own name, or its plain values."""
    plain = ", ".join(str(value) for value in row.values() if isinstance(value, str | int))
    return str(row.get("id") or ascii(plain[:80])[1:-1])


def _value(row: dict[str, Any], name: str, kind: Any) -> object:
    if name in row:
        return msgspec.convert(row[name], kind)
    try:
        return msgspec.convert(None, kind)
    except msgspec.ValidationError:
        return (get_origin(kind) or kind)()
