# SPDX-License-Identifier: Apache-2.0
"""No table is without its test."""

import tomllib

from tests.support.rows import TESTS


def test_a_test_reads_every_table() -> None:
    home = TESTS / "data" / "tables"
    unread = []
    for file in home.rglob("*.toml"):
        module = TESTS / file.relative_to(home).with_name(f"test_{file.stem}.py")
        text = module.read_text() if module.exists() else ""
        read = text.split("@rows\n")[1:]
        unread += [
            f"{file}: {name}"
            for name in tomllib.loads(file.read_text())
            if not any(f"def test_{name}(" in part.partition("\n\n\n")[0] for part in read)
        ]
    assert unread == []
