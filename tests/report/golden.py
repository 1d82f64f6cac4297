# SPDX-License-Identifier: Apache-2.0
"""Texts that are kept in files: a difference is shown, with the command that accepts it."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data" / "report"


def assert_matches_file(actual: str, path: Path, tmp_path: Path) -> None:
    """Fail unless the file holds `actual`, with a newline at its end."""
    text = actual + "\n"
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text == expected:
        return
    new = tmp_path / path.name
    new.write_text(text, encoding="utf-8")
    diff = unified_diff(
        expected.splitlines(), text.splitlines(), str(path), "what the code says now", lineterm=""
    )
    pytest.fail("\n".join([*diff, "", "to accept it:", f"cp {new} {path}"]), pytrace=False)
