# SPDX-License-Identifier: Apache-2.0
"""Node patterns mean what Slurm's node lists mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.rules.settings import is_pattern, matches
from slurm_health.records.nodeset import expand, fold


@pytest.mark.parametrize(
    ("name", "patterns", "meant"),
    [
        ("gpu07", [], True),
        ("gpu07", ["gpu*"], True),
        ("gpu07", ["gpu[01-16]"], True),
        ("gpu7", ["gpu[01-16]"], False),
        ("gpu17", ["gpu[01-16,20]"], False),
        ("gpu20", ["gpu[01-16,20]"], True),
        ("gpu07", ["gpu*", "!gpu07"], False),
        ("login", ["!gpu*"], True),
        ("r2n03", ["r[1-2]n[01-04]"], True),
        ("r3n03", ["r[1-2]n[01-04]"], False),
        ("gpuX", ["gpu?"], True),
    ],
)
def test_a_name_is_meant_by_patterns(name: str, patterns: list[str], meant: bool) -> None:
    assert matches(name, patterns) is meant


@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=20, unique=True),
    st.integers(1, 4),
    st.integers(0, 130),
)
def test_a_folded_list_means_the_nodes_it_was_folded_from(
    numbers: list[int], width: int, probe: int
) -> None:
    names = [f"gpu{number:0{width}d}" for number in numbers]
    patterns = _patterns(fold(names))
    assert all(matches(name, patterns) for name in names)
    other = f"gpu{probe:0{width}d}"
    assert matches(other, patterns) is (other in expand(fold(names)))


def _patterns(folded: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for character in folded:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@pytest.mark.parametrize("text", ["", "a b", "gpu[", "gpu[x]", "!", "gpu[1-]", "$(x)"])
def test_what_is_no_pattern_is_told(text: str) -> None:
    assert not is_pattern(text)


@given(st.text(max_size=20))
def test_no_text_breaks_it(text: str) -> None:
    if is_pattern(text):
        matches("gpu07", [text])
