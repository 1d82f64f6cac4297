# SPDX-License-Identifier: Apache-2.0
"""Tests whose rows are data: what is given, and what is to come of it."""

import functools
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec
import pytest

TESTS = Path(__file__).parents[1]
Test = TypeVar("Test", bound=Callable[..., None])


@functools.cache
def tables(module: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a module's tests, by the tests' names without `test_`."""
    name = module.relative_to(TESTS).with_name(f"{module.stem.removeprefix('test_')}.toml")
    return tomllib.loads((TESTS / "data" / "tables" / name).read_text())


def rows(test: Test) -> Test:
    """Run a test once for each of its rows.

    A row has the test's arguments by name, in the form of JSON, with `<null>` for null; what it
    lacks is None or empty. It may have an `id`.
    """
    kinds = get_type_hints(test)
    given = tables(Path(inspect.getfile(test)))[test.__name__.removeprefix("test_")]
    unknown = {name for row in given for name in row} - {*kinds, "id"}
    assert not unknown, f"{test.__name__} has no arguments {unknown}"
    names = [name for name in kinds if any(name in row for row in given)]
    values = [
        pytest.param(*(_value(row, name, kinds[name]) for name in names), id=_name(row))
        for row in given
    ]
    marked: Test = pytest.mark.parametrize(names, values)(test)
    return marked


def _name(row: dict[str, Any]) -> str | None:
    """Return the row's own name, or its plain values."""
    plain = ", ".join(str(value) for value in row.values() if isinstance(value, str | int))
    return str(row.get("id") or ascii(plain[:80])[1:-1]) or None


def _value(row: dict[str, Any], name: str, kind: Any) -> object:
    if name in row:
        return msgspec.convert(_with_nulls(row[name]), kind, str_keys=True)
    try:
        return msgspec.convert(None, kind)
    except msgspec.ValidationError:
        return (get_origin(kind) or kind)()


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_nulls(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    return None if value == "<null>" else value
