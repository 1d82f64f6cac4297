# SPDX-License-Identifier: Apache-2.0
"""Tests whose rows stand in a data file: those of a package's directory, or of a module's.

`tests/data/rows/preflight-agent.json` has, by test, the names of its parameters and a row a line.
A row that says why it is there is that sentence and the values.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

TESTS = Path(__file__).parents[1]
Test = typing.TypeVar("Test", bound=Callable[..., None])


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    of: list[str]
    rows: list[list[Any] | dict[str, list[Any]]]


@functools.cache
def _tables(name: str) -> dict[str, _Table]:
    path = TESTS / "data" / "rows" / f"{name}.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, _Table])


def rows(test: Test) -> Test:
    """Run a test once for each of its rows, whose values are of the types that it declares."""
    directory = Path(inspect.getfile(test)).parent.relative_to(TESTS)
    table = _tables("-".join(directory.parts))[test.__name__]
    types = [typing.get_type_hints(test)[name] for name in table.of]
    parameters = []
    for row in table.rows:
        ((why, values),) = row.items() if isinstance(row, dict) else (("", row),)
        pairs = zip(values, types, strict=True)
        converted = (msgspec.convert(value, kind, str_keys=True) for value, kind in pairs)
        parameters.append(pytest.param(*converted, id=why or None))
    marked: Test = pytest.mark.parametrize(table.of, parameters)(test)
    return marked
