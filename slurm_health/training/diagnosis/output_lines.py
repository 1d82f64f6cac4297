# SPDX-License-Identifier: Apache-2.0
"""Lines of a job's output that count steps, and the losses that they show.

A training makes progress while lines repeat with a number that counts up: `step 120 loss 0.31`,
`iter 120/1000`, `Epoch 1:  12%|#2   | 120/1000 [00:12<01:28]` with carriage returns. No format is
known beforehand. Lines are compared without their numbers, and a number that rose often enough in
repeated lines is a counter. Times of day and durations rise without a training, so they do not
count.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

_LINE_CHARACTERS = 300
_MOST_LINES = 500  # of the new text
_MOST_SHAPES = 256
_MOST_LABEL = 15  # lines of ranks behind this one repeat those of others
_RISES = 6  # and no fall: then a number counts
_MOST_APART = 16  # lines, by which ranks that write the same ones may differ
_OURS = "slurm-health: "  # our own lines about a hang do not end it
_ENDS = re.compile(r"[\r\n]+")
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e]")
_BAR = re.compile(r"\|[#\d\s=>.-]*\|")
_TIMES = re.compile(
    r"\d+(?:[:-]\d+)+(?:[.,]\d+)?Z?|\d+(?:\.\d+)?\s?(?:[a-z]+/s|s/[a-z]+|[mun]?s\b|sec\w*|min\w*)"
)
_LABEL = re.compile(r"\[?(?:rank\s?)?(\d{1,6})\]?:\s", re.IGNORECASE)  # of a launcher
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_IN_A_ROW = 2  # steps with NaN or infinite losses: a loss scaler may skip a single one
# `step 120 | loss nan`, `{'loss': nan, 'epoch': 0.02}`, `train_loss=inf`, `lm loss: tensor(nan, …)`
_LOSS = re.compile(
    r"(?<![a-z])loss['\"]?\s{0,3}(?:[:=]|is)?\s{0,3}(?:tensor\()?"
    r"(?P<value>nan\b|[-+]?inf(?:inity)?\b|[-+]?\d)",
    re.IGNORECASE,
)
# Prefixes of the word: the best of earlier steps, which is infinite at first ...
_EARLIER = re.compile(
    r"(?<![a-z])(?:best|(?<!\d)(?<!\d )min|minimum|lowest|prev|previous)"
    r"(?:[ _./-](?:train|training|val|valid|validation|eval|test|dev|lm|total|mean|avg))?"
    r"[ _./-]{1,2}$",
    re.IGNORECASE,
)
# ... or an occasional or a partial loss (`val_loss`, `aux_loss`).
_BESIDE = re.compile(
    r"(?<![a-z])(?!(?:train|training|total|lm|step|batch)[ _./-])[a-z]\w*[ _./-]$", re.IGNORECASE
)
_NAME_CHARACTERS = 40  # before the word
# `Saving model checkpoint to out/checkpoint-500`, `saved ckpt at step 500`, `checkpoint written`
_SAVED = re.compile(
    r"\b(?:sav(?:ed|ing)|wrote|written|writing)\b.{0,60}(?:checkpoint|ckpt)"
    r"|(?:checkpoint|ckpt).{0,60}\b(?:saved|written)\b",
    re.I,
)
_COUNTED = re.compile(r"(?<![a-z])(?:global_?)?(?:step|iter(?:ation)?)s?\W{0,4}(\d+)", re.I)


class NonFiniteLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The first and the latest of consecutive lines whose loss is NaN or infinite."""

    first: str
    line: str

    @property
    def step(self) -> int:
        """The step of the first line, 0 without one."""
        named = _COUNTED.search(self.first)
        return int(named[1]) if named else 0


class _Number:
    """One number of a repeated line, and its highest recent values."""

    def __init__(self, value: float) -> None:
        self._highest: deque[float] = deque([value], maxlen=_MOST_APART)
        self._rises = 0

    def take(self, value: float) -> bool:
        """Add its next value; return whether it is a counter that went on."""
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
        # Ranks that write the same line are steps apart: another one wrote this value before.
        comes_behind = value.is_integer() and (value >= highest - 1 or value in self._highest)
        if value != highest and not comes_behind:
            self._rises = max(0, self._rises - 2)
        return False


class StepLines:
    """Detects the lines of a file that count, and when they last did. Callers pass the time.

    Text between two readings counts as written at the later one.

    Attributes:
        line: the latest line that counted, empty before there is one; `step` is its number.
        last_s: when a line last counted, or a new kind of line came.
        intervals: readings with such a line, less one; `longest_s` is the longest time between two.
        saved: the last line that names a checkpoint as written, at `saved_s`.
    """

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, list[_Number]] = OrderedDict()
        self._rest = ""
        self._first_s = 0.0
        self._losses = Losses()
        self.intervals = 0
        self.last_s = self.longest_s = 0.0
        self.line, self.step = "", 0
        self.saved, self.saved_s = "", 0.0

    @property
    def typical_s(self) -> float:
        """The usual time between readings with a line that counts."""
        return (self.last_s - self._first_s) / max(1, self.intervals)

    def take(self, text: str, now_s: float) -> NonFiniteLoss | None:
        """Read new text, which may end within a line.

        Returns:
            that the losses have become NaN or infinite, if that is new.
        """
        *lines, self._rest = _ENDS.split(self._rest + text)
        self._rest = self._rest[-_LINE_CHARACTERS:]
        # A new kind of line is progress, too: an evaluation, a checkpoint, a warning.
        went_on, lost = False, None
        for line in lines[-_MOST_LINES:]:
            if line.startswith(_OURS):
                continue
            went_on |= self._take_line(line[:_LINE_CHARACTERS])
            if _SAVED.search(line[:_LINE_CHARACTERS]):
                self.saved = " ".join(_CONTROLS.sub(" ", line[:_LINE_CHARACTERS]).split())
                self.saved_s = now_s
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
        """Drop the partial line before a part of the output that was not read."""
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
    """Follows the losses of one file; reports once that they are NaN or infinite.

    Weights that are NaN stay so, and the training goes on for days and ends well. Several ranks may
    write a line for one step: two consecutive steps with such losses count.
    """

    first: str = ""
    reported: bool = False
    _steps: int = 0
    _latest: tuple[str, ...] = ()

    def take(self, text: str) -> NonFiniteLoss | None:
        """Read a line; return the losses if this line is the first to show it."""
        line = _CONTROLS.sub(" ", text)[:_LINE_CHARACTERS]
        begin, losses = _losses(line)
        if not losses:
            return None
        if any(value[-1].isdigit() for value in losses):
            self.first, self._steps, self._latest = "", 0, ()
            return None
        # The numbers that identify the step: those before the loss, or all.
        label = _LABEL.match(line)
        first = label.end() if label else 0
        step = tuple(_NUMBER.findall(line, first, begin) or _NUMBER.findall(line, first))
        if step and step != self._latest:
            self.first = self.first or line.strip()
            self._latest = step
            self._steps += 1
        if self._steps < _IN_A_ROW or self.reported:
            return None
        self.reported = True
        return NonFiniteLoss(first=self.first, line=line.strip())


def first_non_finite(lines: Iterable[str]) -> str:
    """Return the first of the latest lines with NaN or infinite losses, empty without any.

    `lines` come latest first; they are read back to a finite loss.
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
    """Return the place of the first loss of a line, and the losses of its step.

    Losses of earlier steps do not count; occasional and partial ones only without another.
    """
    matches = list(_LOSS.finditer(line))
    now = [match for match in matches if not _is_named(_EARLIER, line, match.start())]
    whole = [match for match in now if not _is_named(_BESIDE, line, match.start())]
    begin = matches[0].start() if matches else 0
    return begin, [match["value"] for match in whole or now]


def _is_named(pattern: re.Pattern[str], line: str, end: int) -> bool:
    return pattern.search(line, max(0, end - _NAME_CHARACTERS), end) is not None
