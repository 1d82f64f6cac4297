# SPDX-License-Identifier: Apache-2.0
"""Lines of a job's output that count steps, and the losses that they show.

A training goes on while lines come again with a number that counts up: `step 120 loss 0.31`,
`iter 120/1000`, `Epoch 1:  12%|#2   | 120/1000 [00:12<01:28]` with carriage returns. No line is
known beforehand. Lines are compared without their numbers, and a number that rose often enough
while its line came again is a counter. Times of day and durations rise without a training, so they
are no numbers here.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

_LINE_CHARACTERS = 300
_MOST_LINES = 500  # of what was written since the last time
_MOST_SHAPES = 256
_MOST_LABEL = 15  # lines of ranks behind this one repeat those of others
_RISES = 6  # and no fall: then a number counts
_MOST_APART = 16  # lines, by which ranks that write the same ones and do not wait may differ
_OURS = "slurm-health: "  # what we write about a hang ends none
_ENDS = re.compile(r"[\r\n]+")
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e]")
_BAR = re.compile(r"\|[#\d\s=>.-]*\|")
_TIMES = re.compile(
    r"\d+(?:[:-]\d+)+(?:[.,]\d+)?Z?|\d+(?:\.\d+)?\s?(?:[a-z]+/s|s/[a-z]+|[mun]?s\b|sec\w*|min\w*)"
)
_LABEL = re.compile(r"\[?(?:rank\s?)?(\d{1,6})\]?:\s", re.IGNORECASE)  # of a launcher
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_IN_A_ROW = 2  # steps whose losses are none: a loss scaler may skip one alone
# `step 120 | loss nan`, `{'loss': nan, 'epoch': 0.02}`, `train_loss=inf`, `lm loss: tensor(nan, …)`
_LOSS = re.compile(
    r"(?<![a-z])loss['\"]?\s{0,3}(?:[:=]|is)?\s{0,3}(?:tensor\()?"
    r"(?P<value>nan\b|[-+]?inf(?:inity)?\b|[-+]?\d)",
    re.IGNORECASE,
)
# What stands before the word: the best of earlier steps, which is infinite before there is any ...
_EARLIER = re.compile(
    r"(?<![a-z])(?:best|(?<!\d)(?<!\d )min|minimum|lowest|prev|previous)"
    r"(?:[ _./-](?:train|training|val|valid|validation|eval|test|dev|lm|total|mean|avg))?"
    r"[ _./-]{1,2}$",
    re.IGNORECASE,
)
# ... or what is measured at times, or is a part (`val_loss`, `aux_loss`), and not the loss itself.
_BESIDE = re.compile(
    r"(?<![a-z])(?!(?:train|training|total|lm|step|batch)[ _./-])[a-z]\w*[ _./-]$", re.IGNORECASE
)
_NAME_CHARACTERS = 40  # before the word
_COUNTED = re.compile(r"(?<![a-z])(?:global_?)?(?:step|iter(?:ation)?)s?\W{0,4}(\d+)", re.I)


class LossIsNone(msgspec.Struct, frozen=True, kw_only=True):
    """The first line and the latest one of those in a row whose loss is no number."""

    first: str
    line: str

    @property
    def step(self) -> int:
        """The step at which it began, 0 where its line names none."""
        named = _COUNTED.search(self.first)
        return int(named[1]) if named else 0


class _Number:
    """One number of a line that comes again, and the highest that it was of late."""

    def __init__(self, value: float) -> None:
        self._highest: deque[float] = deque([value], maxlen=_MOST_APART)
        self._rises = 0

    def take(self, value: float) -> bool:
        """Take in its next value; tell whether it is a counter that went on."""
        counts = self._rises >= _RISES
        highest = self._highest[-1]
        if value > highest:
            self._highest.append(value)
            self._rises += 1
            return counts
        if value < highest / 2:  # a counter that begins again, as with the next epoch
            self._highest.clear()
            self._highest.append(value)
            self._rises = max(0, self._rises - _RISES)
            return counts
        # Ranks that write the same line are steps apart: what one writes, another wrote before.
        comes_behind = value.is_integer() and (value >= highest - 1 or value in self._highest)
        if value != highest and not comes_behind:
            self._rises = max(0, self._rises - 2)
        return False


class StepLines:
    """Learns which lines of a file count, and when they last did. Callers pass the time.

    What is written between two readings counts as written at the later one.

    Attributes:
        line: the latest line that counted, empty before there is one; `step` is its number.
        last_s: when a line last counted, or one came that had never come before.
        intervals: readings with such a line, less one; `longest_s` is the longest time between two.
    """

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, list[_Number]] = OrderedDict()
        self._rest = ""
        self._first_s = 0.0
        self._losses = Losses()
        self.intervals = 0
        self.last_s = self.longest_s = 0.0
        self.line, self.step = "", 0

    @property
    def typical_s(self) -> float:
        """How far apart readings with a line that counts are."""
        return (self.last_s - self._first_s) / max(1, self.intervals)

    def take(self, text: str, now_s: float) -> LossIsNone | None:
        """Take in what was written since the last time; it may end within a line.

        Returns:
            that the losses are no numbers any more, if that is new.
        """
        *lines, self._rest = _ENDS.split(self._rest + text)
        self._rest = self._rest[-_LINE_CHARACTERS:]
        # Any line that never came before is something new: an evaluation, a checkpoint, a warning.
        went_on, lost = False, None
        for line in lines[-_MOST_LINES:]:
            if line.startswith(_OURS):
                continue
            went_on |= self._take_line(line[:_LINE_CHARACTERS])
            lost = self._losses.take(line) or lost
        if went_on:
            if self._first_s:
                self.intervals += 1
                self.longest_s = max(self.longest_s, now_s - self.last_s)
            else:
                self._first_s = now_s
            self.last_s = now_s
        return lost

    def skip(self) -> None:
        """Forget the half line before a part of the output that was not read."""
        self._rest = ""

    def _take_line(self, line: str) -> bool:
        plain = _TIMES.sub("~", _BAR.sub("||", _CONTROLS.sub(" ", line)))
        label = _LABEL.match(plain)
        if label and int(label[1]) > _MOST_LABEL:
            return False
        begin = label.end() if label else 0
        shape = " ".join((plain[:begin] + _NUMBER.sub("#", plain[begin:])).split())
        values = [float(number) for number in _NUMBER.findall(plain, begin)]
        known = self._shapes.pop(shape, None)
        self._shapes[shape] = known or [_Number(value) for value in values]
        if known is None:
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.popitem(last=False)
            return bool(self.line)
        pairs = list(zip(known, values, strict=True))
        counted = [value for number, value in pairs if number.take(value)]
        if counted:
            self.line, self.step = " ".join(plain.split()), int(max(counted))
        return bool(counted)


@dataclass
class Losses:
    """Follows the losses of one file; reports once that they are no numbers.

    Once weights are no numbers, no later loss is one, and a training goes on so for days and ends
    well. Ranks may each write a line for one step: what counts is that the losses of two steps in a
    row are none.
    """

    first: str = ""
    reported: bool = False
    _steps: int = 0
    _latest: tuple[str, ...] = ()

    def take(self, text: str) -> LossIsNone | None:
        """Take in a line; return what is known if this is the first to show it."""
        line = _CONTROLS.sub(" ", text)[:_LINE_CHARACTERS]
        begin, losses = _losses(line)
        if not losses:
            return None
        if any(value[-1].isdigit() for value in losses):
            self.first, self._steps, self._latest = "", 0, ()
            return None
        step = _numbers_of_step(line, begin)
        if step and step != self._latest:
            self.first = self.first or line.strip()
            self._latest = step
            self._steps += 1
        if self._steps < _IN_A_ROW or self.reported:
            return None
        self.reported = True
        return LossIsNone(first=self.first, line=line.strip())


def first_without_number(lines: Iterable[str]) -> str:
    """Return the first line of those whose losses are no numbers, empty if the latest is one.

    `lines` come latest first; what stands before a loss that is a number is not read.
    """
    first = ""
    for text in lines:
        line = _CONTROLS.sub(" ", text)[:_LINE_CHARACTERS]
        _, losses = _losses(line)
        if any(value[-1].isdigit() for value in losses):
            break
        if losses:
            first = line.strip()
    return first


def _losses(line: str) -> tuple[int, list[str]]:
    """Return where the first loss of a line is, and those of its step.

    They are none of an earlier step; a part, and one that is measured at times, only if the line
    has nothing else.
    """
    matches = list(_LOSS.finditer(line))
    now = [match for match in matches if not _is_named(_EARLIER, line, match.start())]
    whole = [match for match in now if not _is_named(_BESIDE, line, match.start())]
    begin = matches[0].start() if matches else 0
    return begin, [match["value"] for match in whole or now]


def _is_named(pattern: re.Pattern[str], line: str, end: int) -> bool:
    return pattern.search(line, max(0, end - _NAME_CHARACTERS), end) is not None


def _numbers_of_step(line: str, end: int) -> tuple[str, ...]:
    """Return the numbers that say which step a line is about: those before its loss, or all."""
    label = _LABEL.match(line)
    begin = label.end() if label else 0
    return tuple(_NUMBER.findall(line, begin, end) or _NUMBER.findall(line, begin))
