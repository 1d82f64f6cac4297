# SPDX-License-Identifier: Apache-2.0
"""Node lists as people and Slurm write them, `gpu[01-04,7]`, and its words for a node's state.

The order of a list counts: Slurm numbers the tasks of a job and lists its resources by it. In a
state, such as `IDLE+DRAIN` or `ALLOCATED*`, whole words count: POWER_DOWN is an order for a healthy
node once its job is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, product
from math import prod

# No text can be split in two ways: a text that is no list is refused as fast as a list is read.
_NAME = re.compile(r"(?=[\w.\[-])[\w.-]*(?:\[[\w.,-]*\][\w.-]*)*", re.ASCII)
_NODELIST = re.compile(rf"{_NAME.pattern}(?:,{_NAME.pattern})*", re.ASCII)
_BRACKETS = re.compile(r"\[([^]]*)\]")
# Longer numbers are text: Slurm counts in 64 bits.
_MOST_DIGITS = 18
_RANGE = re.compile(rf"(\d{{1,{_MOST_DIGITS}}})(?:-(\d{{1,{_MOST_DIGITS}}}))?", re.ASCII)
_NUMBER = re.compile(rf"(\d{{1,{_MOST_DIGITS}}})", re.ASCII)
# Slurm 22.05 takes the range n[1-65536] and refuses a longer one; here it bounds the whole list.
_MOST_NAMES = 64 * 1024
_MARKS = "*~#!%$@^-"
_SILENT_MARK = "*"  # as sinfo says NOT_RESPONDING
# Slurm's own acts on a node that make it silent. No job runs on it meanwhile.
_SILENCED = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED"})


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the names of a node list, without repetition, in their order.

    Of several brackets in a name the last counts fastest, as in Slurm.

    Raises:
        ValueError: the text is not a node list.
    """
    if not _NODELIST.fullmatch(nodelist):
        raise ValueError(f"cannot read {nodelist!r} as a node list")
    names: list[str] = []
    try:
        for name in _NAME.findall(nodelist):
            names += _named(name, most=_MOST_NAMES - len(names))
    except ValueError as err:
        raise ValueError(f"cannot read {nodelist!r} as a node list: {err}") from err
    return tuple(dict.fromkeys(names))


def _named(name: str, *, most: int) -> Iterable[str]:
    """Return the names that a name with brackets stands for."""
    pieces = _BRACKETS.split(name)  # outside of brackets, and within, in turn
    within = [[_range(part) for part in piece.split(",")] for piece in pieces[1::2]]
    if prod(sum(len(numbers) for numbers, _ in ranges) for ranges in within) > most:
        raise ValueError(f"more than {_MOST_NAMES} nodes")
    choices: list[Iterable[str]] = [[piece] for piece in pieces]
    choices[1::2] = [
        [f"{number:0{width}}" for numbers, width in ranges for number in numbers]
        for ranges in within
    ]
    return map("".join, product(*choices))


def _range(text: str) -> tuple[range, int]:
    """Return numbers, with their least number of digits."""
    match = _RANGE.fullmatch(text)
    if match is not None:
        first, last = match[1], match[2] or match[1]
        numbers, width = range(int(first), int(last) + 1), len(first)
        # Slurm writes [08-100], where a cluster has outgrown its zeros.
        if numbers and last == f"{numbers[-1]:0{width}}":
            return numbers, width
    raise ValueError(f"{text!r} is not a range of numbers")


def fold(nodes: Iterable[str]) -> str:
    """Return a short node list for a set, in natural order; empty for none.

    For text, and for options of Slurm in which the order does not count.
    """

    def natural(name: str) -> tuple[bool, list[str | int], int, str]:
        parts: list[str | int] = [*_NUMBER.split(name)]  # so that n9 comes before n10
        parts[1::2] = map(int, parts[1::2])
        return not name[-1:].isdigit(), parts, len(name), name  # unnumbered ones last

    return fold_in_order(sorted(set(nodes), key=natural))


def fold_in_order(nodes: Iterable[str]) -> str:
    """Return the node list that Slurm expands to these nodes in this order, empty for none.

    Slurm 22.05 refuses brackets that are followed by text, as in `n[1-2]-ib` or
    `r[1-2]n3`, so only a number at the end of a name is folded.
    """
    written = []
    parted = map(_parted, dict.fromkeys(nodes))
    for (text, numbered), group in groupby(parted, key=lambda parts: (parts[0], parts[1] != "")):
        ranges = list(_ranges(number for _, number in group)) if numbered else [""]
        single = len(ranges) == 1 and "-" not in ranges[0]
        written.append(f"{text}{ranges[0]}" if single else f"{text}[{','.join(ranges)}]")
    return ",".join(written)


def _parted(name: str) -> tuple[str, str]:
    """Return a name without the number at its end, and the number."""
    text = name.rstrip("0123456789")
    number = name[len(text) :]
    return (text, number) if len(number) <= _MOST_DIGITS else (name, "")


def _ranges(numbers: Iterator[str]) -> Iterator[str]:
    """Yield `08-11` for numbers that follow one another, and others as they are."""
    first = last = next(numbers)
    for number in numbers:
        # A width that is written as zeros stays: not every tool reads [08-100].
        outgrown = len(number) > len(first) and first != f"{int(first)}"
        if number != f"{int(last) + 1:0{len(last)}}" or outgrown:
            yield first if first == last else f"{first}-{last}"
            first = number
        last = number
    yield first if first == last else f"{first}-{last}"


def words_of(state: str) -> frozenset[str]:
    """Return the words of a state, without marks such as `*`."""
    return frozenset(word.rstrip(_MARKS) for word in state.split("+") if word)


def is_down(state: str) -> bool:
    """Tell whether Slurm has given a node up, and ended what ran there."""
    return "DOWN" in words_of(state)


def is_lost(state: str) -> bool:
    """Tell whether Slurm has lost a node: it is down or does not answer.

    FAIL is none: an administrator expects the node to fail, and its job goes on. Nor is a node
    whose power Slurm has taken, or that it boots: that happens to nodes that no job has any more.
    """
    words = words_of(state)
    silent = "NOT_RESPONDING" in words or _SILENT_MARK in state
    return "DOWN" in words or (silent and words.isdisjoint(_SILENCED))
