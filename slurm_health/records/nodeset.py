# SPDX-License-Identifier: Apache-2.0
"""Node lists as people and Slurm write them, `gpu[01-04,7]`, and its words for a node's state.

The order of a list counts: by it Slurm numbers the tasks of a job and says what each node has. Of a
state, as `IDLE+DRAIN` or `ALLOCATED*`, whole words count: POWER_DOWN is what Slurm is to do to a
healthy node once its job is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby, product
from math import prod

# No text can be divided in two ways, so that one that is no list is refused as fast as one is read.
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
# What Slurm has done to a node, which is silent for it. None runs a job meanwhile.
_SILENCED = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED"})


def expand(nodelist: str) -> tuple[str, ...]:
    """Return the names a node list stands for, each once, in the order in which they are written.

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
    pieces = _BRACKETS.split(name)  # what stands outside of brackets, and within, in turn
    within = [[_range(each) for each in piece.split(",")] for piece in pieces[1::2]]
    if prod(sum(len(numbers) for numbers, _ in ranges) for ranges in within) > most:
        raise ValueError(f"more than {_MOST_NAMES} nodes")
    choices: list[Iterable[str]] = [[piece] for piece in pieces]
    choices[1::2] = [
        [f"{number:0{width}}" for numbers, width in ranges for number in numbers]
        for ranges in within
    ]
    return map("".join, product(*choices))


def _range(text: str) -> tuple[range, int]:
    """Return numbers, and how many digits each has at least."""
    found = _RANGE.fullmatch(text)
    if found is not None:
        first, last = found[1], found[2] or found[1]
        numbers, width = range(int(first), int(last) + 1), len(first)
        # Slurm writes [08-100], where a cluster has outgrown its zeros.
        if numbers and last == f"{numbers[-1]:0{width}}":
            return numbers, width
    raise ValueError(f"{text!r} is not a range of numbers")


def fold(nodes: Iterable[str]) -> str:
    """Return a short node list, in natural order, that stands for a set; empty for none.

    For what people read, and where Slurm asks which nodes and not in which order.
    """
    return fold_in_order(sorted(set(nodes), key=_natural))


def fold_in_order(nodes: Iterable[str]) -> str:
    """Return the node list that Slurm expands to these nodes in this order, empty for none.

    Slurm 22.05 refuses brackets that are followed by text, as in `n[1-2]-ib` or
    `r[1-2]n3`, so only a number at the end of a name is folded.
    """
    parted = map(_parted, dict.fromkeys(nodes))
    written = []
    for (text, numbered), group in groupby(parted, key=lambda each: (each[0], each[1] != "")):
        ranges = list(_ranges(number for _, number in group)) if numbered else [""]
        single = len(ranges) == 1 and "-" not in ranges[0]
        written.append(f"{text}{ranges[0]}" if single else f"{text}[{','.join(ranges)}]")
    return ",".join(written)


def _natural(name: str) -> tuple[bool, list[str | int], int, str]:
    """Return what to sort names by, so that n9 comes before n10; unnumbered ones last."""
    parts: list[str | int] = [*_NUMBER.split(name)]
    parts[1::2] = map(int, parts[1::2])
    return not name[-1:].isdigit(), parts, len(name), name


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
