# SPDX-License-Identifier: Apache-2.0
"""How a training gets on by its output alone: lines that come again with a number that counts up.

`step 120 loss 0.31`, `iter 120/1000`, `Epoch 1:  12%|#2   | 120/1000 [00:12<01:28]` with carriage
returns: no line is known beforehand. Lines are compared without their numbers, and a number that
rose often enough while its line came again is a counter. Times of day and durations rise without
a training, so they are no numbers here.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from slurm_health.training.diagnosis.pace import Pace

_LINE_CHARACTERS = 300
_MOST_LINES = 500  # of what was written since the last look
_MOST_SHAPES = 256
_MOST_LABEL = 15  # lines of ranks behind this one say what those of others say
_RISES = 6  # and no fall: then a number counts

_OURS = "slurm-health: "  # what we say of a hang ends none

_ENDS = re.compile(r"[\r\n]+")
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e]")
_BAR = re.compile(r"\|[#\d\s=>.-]*\|")
_TIMES = re.compile(
    r"\d+(?:[:-]\d+)+(?:[.,]\d+)?Z?|\d+(?:\.\d+)?\s?(?:[a-z]+/s|s/[a-z]+|[mun]?s\b|sec\w*|min\w*)"
)
_LABEL = re.compile(r"\[?(?:rank\s?)?(\d{1,6})\]?:\s", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass
class _Number:
    """One number of a line that comes again, and the highest that it was."""

    highest: float
    rises: int = 0

    def take(self, value: float) -> bool:
        """Take in its next value; tell whether it is a counter that went on."""
        counts = self.rises >= _RISES
        if value > self.highest:
            self.highest = value
            self.rises += 1
            return counts
        if value < self.highest / 2:  # a counter that begins again, as with the next epoch
            self.highest = value
            self.rises = max(0, self.rises - _RISES)
            return counts
        # Ranks that write the same line are a step apart.
        one_behind = value.is_integer() and value >= self.highest - 1
        if value != self.highest and not one_behind:
            self.rises = max(0, self.rises - 2)
        return False


class StepLines:
    """Learns which lines count, and keeps when they last did. Its time is told.

    What is written between two looks counts as written at the later one.
    """

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, list[_Number]] = OrderedDict()
        self._rest = ""
        self._intervals = 0
        self._first_s = self.last_s = self._longest_s = 0.0
        # The latest line that counted, and the number that did.
        self.line, self.step = "", 0

    @property
    def pace(self) -> Pace:
        """How the lines come: intervals between looks with a line that counted stand for steps."""
        typical_s = (self.last_s - self._first_s) / max(1, self._intervals)
        return Pace(steps=self._intervals, typical_s=typical_s, longest_s=self._longest_s)

    def age_s(self, now_s: float) -> float:
        """Return since when no line counted, and none came that had never come; 0 before that."""
        return now_s - self.last_s if self.line else 0.0

    def take(self, text: str, now_s: float) -> None:
        """Take in what was written since the last look; it may end within a line."""
        *lines, self._rest = _ENDS.split(self._rest + text)
        self._rest = self._rest[-_LINE_CHARACTERS:]
        # Any line that never came before is something new: an evaluation, a checkpoint, a warning.
        went_on = False
        for line in lines[-_MOST_LINES:]:
            went_on |= self._take_line(line[:_LINE_CHARACTERS])
        if went_on:
            self._note(now_s)

    def skip(self) -> None:
        """Forget the half line before a part of the output that was not read."""
        self._rest = ""

    def _take_line(self, line: str) -> bool:
        if line.startswith(_OURS):
            return False
        plain = _TIMES.sub("~", _BAR.sub("||", _CONTROLS.sub(" ", line)))
        label = _LABEL.match(plain)
        if label and int(label[1]) > _MOST_LABEL:
            return False
        begin = label.end() if label else 0
        shape = " ".join((plain[:begin] + _NUMBER.sub("#", plain[begin:])).split())
        values = [float(each) for each in _NUMBER.findall(plain, begin)]
        known = self._shapes.pop(shape, None)
        self._shapes[shape] = known or [_Number(each) for each in values]
        if known is None:
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.popitem(last=False)
            return bool(self.line)
        pairs = list(zip(known, values, strict=True))
        counted = [value for number, value in pairs if number.take(value)]
        if counted:
            self.line, self.step = " ".join(plain.split()), int(max(counted))
        return bool(counted)

    def _note(self, now_s: float) -> None:
        if self._first_s:
            self._intervals += 1
            self._longest_s = max(self._longest_s, now_s - self.last_s)
        else:
            self._first_s = now_s
        self.last_s = now_s
