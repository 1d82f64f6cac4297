# SPDX-License-Identifier: Apache-2.0
"""What the lines of a training's output tell: whether it hangs, and whether its loss is a number.

Without a heartbeat a training hangs where its output stands still, and so do its processes.

Output alone decides nothing: a training may be silent and well. So it takes a longer silence than
heartbeats do, and no process of the job may work.

The training goes on while lines come again with a number that counts up: `step 120 loss 0.31`,
`iter 120/1000`, `Epoch 1:  12%|#2   | 120/1000 [00:12<01:28]` with carriage returns. No line is
known beforehand. Lines are compared without their numbers, and a number that rose often enough
while its line came again is a counter. Times of day and durations rise without a training, so they
are no numbers here.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slurm_health.training.diagnosis.by_movement import Judged, judged
from slurm_health.training.diagnosis.pace import HangPatience, NextLook, RankPace, allowance_s
from slurm_health.training.diagnosis.watched import Looked, Pause, WatchedPrograms
from slurm_health.training.framework import Attribution, DataManager, Inference, Sureness

# Against the times between looks at which lines had counted.
OUTPUT_PATIENCE = HangPatience(at_least_s=200.0, steps=10.0, pauses=2.0, young_s=1800.0)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 600.0  # from one look at the processes to the next
_LINE_CHARACTERS = 300
_MOST_LINES = 500  # of what was written since the last look
_MOST_SHAPES = 256
_MOST_LABEL = 15  # lines of ranks behind this one say what those of others say
_RISES = 6  # and no fall: then a number counts
_MOST_APART = 16  # lines, by which ranks that write the same ones and do not wait may differ
_OURS = "slurm-health: "  # what we say of a hang ends none
_ENDS = re.compile(r"[\r\n]+")
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e]")
_BAR = re.compile(r"\|[#\d\s=>.-]*\|")
_TIMES = re.compile(
    r"\d+(?:[:-]\d+)+(?:[.,]\d+)?Z?|\d+(?:\.\d+)?\s?(?:[a-z]+/s|s/[a-z]+|[mun]?s\b|sec\w*|min\w*)"
)
_LABEL = re.compile(r"\[?(?:rank\s?)?(\d{1,6})\]?:\s", re.IGNORECASE)  # of a launcher
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
NOT_A_NUMBER = "not-a-number"
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


class OutputProgress:
    """How a job's output files get on together. Its time is told."""

    def __init__(self, patience: HangPatience = OUTPUT_PATIENCE) -> None:
        self._patience = patience
        self._files: dict[str, StepLines] = {}
        self._next_look = NextLook(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.hung_s: float | None = None  # since when, once that was said

    def take(self, file: str, text: str, now_s: float, *, torn: bool = False) -> LossIsNone | None:
        """Take in what was written to a file since the last look; `torn`: not all of it.

        Returns:
            that its losses are no numbers any more, where that is new.
        """
        lines = self._files.setdefault(file, StepLines())
        if torn:
            lines.skip()
        return lines.take(text, now_s)

    @property
    def latest(self) -> StepLines | None:
        """The file that counted last, None where none does."""
        counting = [each for each in self._files.values() if each.line]
        return max(counting, key=lambda each: each.last_s, default=None)

    def stalled_s(self, now_s: float) -> float:
        """Return since when no line counted, 0 where none ever did."""
        return self.latest.age_s(now_s) if self.latest else 0.0

    @property
    def allowance_s(self) -> float:
        """How long a pause would be usual."""
        paces = [each.pace for each in self._files.values() if each.line]
        return allowance_s(paces, self._patience)

    def suspect(self, now_s: float) -> bool:
        """Tell whether the processes are to be looked at: not before some time after a look."""
        late = self.stalled_s(now_s) >= self.allowance_s
        return self._next_look.is_due(now_s, late=late) and self.hung_s is None

    def goes_on(self, now_s: float) -> float | None:
        """Return how long a training stood still that was said to hang, and goes on; else None."""
        if self.hung_s is None or self.stalled_s(now_s) >= self._patience.at_least_s:
            return None
        stalled_s = now_s - self.stalled_s(now_s) - self.hung_s
        self.hung_s = None
        return stalled_s

    def not_now(self, now_s: float) -> None:
        """Put off the next look: this one showed a process at work, or nothing."""
        self._next_look.put_off(now_s)

    def judge(
        self,
        watched: WatchedPrograms,
        looked: Looked,
        nodes: Sequence[str],
        *,
        window_s: float,
        now_s: float,
    ) -> Judged:
        """Return what was seen of the training, or why it does not hang so far.

        `looked` was `window_s` before the last that the monitors told; it is `now_s`.
        """
        found: Judged = "it goes on"
        pause = Pause(
            stalled_s=self.stalled_s(now_s),
            allowance_s=self.allowance_s,
            window_s=window_s,
            step=self.latest.step if self.latest else 0,
        )
        if pause.stalled_s >= pause.allowance_s:
            found = judged(watched, looked, nodes, pause, self._patience)
        if isinstance(found, str):
            self.not_now(now_s)
        else:
            self.hung_s = now_s - self.stalled_s(now_s)
        return found


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
    """Learns which lines count, and keeps when they last did. Its time is told.

    What is written between two looks counts as written at the later one.
    """

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, list[_Number]] = OrderedDict()
        self._rest = ""
        self._intervals = 0
        self._first_s = self.last_s = self._longest_s = 0.0
        self._losses = Losses()
        # The latest line that counted, and the number that did.
        self.line, self.step = "", 0

    @property
    def pace(self) -> RankPace:
        """How the lines come: intervals between looks with a line that counted stand for steps."""
        typical_s = (self.last_s - self._first_s) / max(1, self._intervals)
        return RankPace(steps=self._intervals, typical_s=typical_s, longest_s=self._longest_s)

    def age_s(self, now_s: float) -> float:
        """Return since when no line counted, and none came that had never come; 0 before that."""
        return now_s - self.last_s if self.line else 0.0

    def take(self, text: str, now_s: float) -> LossIsNone | None:
        """Take in what was written since the last look; it may end within a line."""
        *lines, self._rest = _ENDS.split(self._rest + text)
        self._rest = self._rest[-_LINE_CHARACTERS:]
        # Any line that never came before is something new: an evaluation, a checkpoint, a warning.
        went_on, lost = False, None
        for line in lines[-_MOST_LINES:]:
            went_on |= self._take_line(line[:_LINE_CHARACTERS])
            if not line.startswith(_OURS):
                lost = self._losses.take(_CONTROLS.sub(" ", line)) or lost
        if went_on:
            self._note(now_s)
        return lost

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


class LossIsNone(msgspec.Struct, frozen=True, kw_only=True):
    """The first line and the latest one of those in a row whose loss is no number."""

    first: str
    line: str


@dataclass
class Losses:
    """Follows the losses that one file tells; says once that they are no numbers.

    Once weights are no numbers, no later loss is one, and a training goes on so for days and ends
    well. Ranks may each tell of one step: what counts is that the losses of two steps in a row are
    none.
    """

    first: str = ""
    told: bool = False
    _steps: int = 0
    _latest: tuple[str, ...] = ()

    def take(self, text: str) -> LossIsNone | None:
        """Take in a line; return what is known where this is the first to show it."""
        line = text[:_LINE_CHARACTERS]
        begin, losses = _losses(line)
        if not losses:
            return None
        if any(value[-1].isdigit() for value in losses):
            self.first, self._steps, self._latest = "", 0, ()
            return None
        step = _step(line, begin)
        if step and step != self._latest:
            self.first = self.first or line.strip()
            self._latest = step
            self._steps += 1
        if self._steps < _IN_A_ROW or self.told:
            return None
        self.told = True
        return LossIsNone(first=self.first, line=line.strip())


def _losses(line: str) -> tuple[int, list[str]]:
    """Return where the first loss of a line is, and those that tell of its step.

    They are none of an earlier step; a part, and one that is measured at times, where nothing else
    is there.
    """
    found = list(_LOSS.finditer(line))
    now = [each for each in found if not _named(_EARLIER, line, each.start())]
    whole = [each for each in now if not _named(_BESIDE, line, each.start())]
    return found[0].start() if found else 0, [each["value"] for each in whole or now]


def _named(pattern: re.Pattern[str], line: str, end: int) -> bool:
    return pattern.search(line, max(0, end - _NAME_CHARACTERS), end) is not None


def _step(line: str, end: int) -> tuple[str, ...]:
    """Return the numbers that tell of which step a line is: those before its loss, or all."""
    label = _LABEL.match(line)
    begin = label.end() if label else 0
    return tuple(_NUMBER.findall(line, begin, end) or _NUMBER.findall(line, begin))


def observe_losses(data: DataManager) -> Inference | None:
    """Return that the loss is no number as an inference; no node is named for it."""
    seen = data.get(LossIsNone)
    if seen is None:
        return None
    return Inference(
        name=NOT_A_NUMBER,
        description="the loss is NaN or infinite at one step after another",
        attribution=Attribution.USER,
        sureness=Sureness.LIKELY,
        evidence=(seen.first, seen.line),
        advice="look at the data, the learning rate and the loss scale, and go on from a checkpoint"
        " before the first of these lines",
    )
