# SPDX-License-Identifier: Apache-2.0
"""Every test can fail: it asserts, or calls something of the tests' own that does.

What is called is known by its name alone, so that a test may pass here that should not, and none is
accused wrongly.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# What pytest and subprocess raise by; `subprocess.run` does with `check=True`.
RAISING = {"check_call", "check_output", "fail", "raises", "warns"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def called(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield node.func.id if isinstance(node.func, ast.Name) else node.func.attr


def fails_itself(function: Function, calls: frozenset[str]) -> bool:
    return bool(RAISING & calls) or any(
        isinstance(node, ast.Assert | ast.Raise) or (isinstance(node, ast.keyword) and checks(node))
        for node in ast.walk(function)
    )


def checks(keyword: ast.keyword) -> bool:
    return (keyword.arg, getattr(keyword.value, "value", None)) == ("check", True)


def without_assertion(texts: Iterable[str]) -> set[str]:
    """Return the names of tests in which nothing can fail but the code that they run."""
    named: dict[str, list[tuple[bool, frozenset[str]]]] = defaultdict(list)
    for text in texts:
        for function in functions(text):
            calls = frozenset(called(function))
            named[function.name].append((fails_itself(function, calls), calls))
    failing = {name for name, found in named.items() if any(fails for fails, _ in found)}
    grown = True
    while grown:
        more = {name for name, found in named.items() if any(failing & calls for _, calls in found)}
        grown = not more <= failing
        failing |= more
    # A name may stand for several tests: each is to fail.
    return {
        name
        for name, found in named.items()
        if name.startswith("test_") and not all(fails or failing & calls for fails, calls in found)
    }


def test_every_test_asserts_something() -> None:
    assert without_assertion(path.read_text() for path in TESTS.rglob("*.py")) == set()


@pytest.mark.parametrize(
    ("body", "asserts"),
    [
        ("assert x", True),
        ("with pytest.raises(E): f()", True),
        ("subprocess.run(words, check=True)", True),
        ("subprocess.run(words, check=False)", False),
        ("helper(x)", True),
        ("site.outer(x)", True),
        ("f(x)", False),
    ],
)
def test_what_asserts_is_told_from_what_does_not(body: str, asserts: bool) -> None:
    helpers = "def helper(x):\n    assert x\ndef outer(x):\n    helper(x)\n"
    found = without_assertion([helpers, f"def test_it():\n    {body}\n"])
    assert found == (set() if asserts else {"test_it"})
