# SPDX-License-Identifier: Apache-2.0
"""Situations of the kinds that public threads report, in words of our own: blame and restarts.

A situation in `tests/data/situations` is what the files of a job of n1 to n4 hold; the cause, whose
it is, the nodes at fault, and what would follow. A node that is named wrongly, or a job that is
started again in vain, is worse than an honest doubt.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.training.monitor.explain import explain

SITUATIONS = Path(__file__).parents[1] / "data/situations"
NODES = ("n1", "n2", "n3", "n4")


class Right(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cause: str
    blame: str
    action: str
    accused: list[str] = []


class Situation(msgspec.Struct, forbid_unknown_fields=True):
    right: Right
    files: list[str]


ROWS = {
    f"{path.stem}: {name}": situation
    for path in sorted(SITUATIONS.glob("*.toml"))
    for name, situation in msgspec.toml.decode(path.read_bytes(), type=dict[str, Situation]).items()
}


@pytest.mark.parametrize("name", ROWS)
def test_a_situation_of_a_known_kind_is_explained(tmp_path: Path, name: str) -> None:
    for number, text in enumerate(ROWS[name].files):
        (tmp_path / f"file{number}").write_text(text)
    _, found = explain([tmp_path], nodes=NODES)
    assert Right(found.cause, found.blame, found.action, found.accused) == ROWS[name].right, found
