# SPDX-License-Identifier: Apache-2.0
"""Whether a node is meant: `gpu[01-16,20]`, `gpu*`, `!login*`.

The hooks match one name against a few patterns before every job; expanding node lists with
ClusterShell would cost more than all checks together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

_BRACKET = re.compile(r"\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def is_pattern(text: str) -> bool:
    """Tell whether a text can be a node pattern."""
    body = text.removeprefix("!")
    rest = _BRACKET.sub("", body)
    ranges = [part for found in _BRACKET.findall(body) for part in found.split(",")]
    return (
        bool(rest or ranges)
        and re.fullmatch(r"[\w.*?-]*", rest, re.ASCII) is not None
        and all(_RANGE.fullmatch(part) for part in ranges)
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is meant by patterns. None at all mean every name.

    A pattern that begins with `!` takes names away, wherever it stands.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    refused = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if any(_matches_one(name, pattern) for pattern in refused):
        return False
    return not wanted or any(_matches_one(name, pattern) for pattern in wanted)


def _matches_one(name: str, pattern: str) -> bool:
    if "[" not in pattern:
        return fnmatchcase(name, pattern)
    brackets = _BRACKET.findall(pattern)
    literals = _BRACKET.split(pattern)[::2]
    wanted = r"(\d+)".join(re.escape(text).replace(r"\*", ".*") for text in literals)
    found = re.fullmatch(wanted.replace(r"\?", "."), name)
    return found is not None and all(
        _in_ranges(number, ranges) for number, ranges in zip(found.groups(), brackets, strict=True)
    )


def _in_ranges(number: str, ranges: str) -> bool:
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            continue
        low, high = found.group(1), found.group(2) or found.group(1)
        # Slurm pads every number of a range to the width of its first.
        if int(low) <= int(number) <= int(high) and number == str(int(number)).zfill(len(low)):
            return True
    return False
