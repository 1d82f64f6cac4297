# SPDX-License-Identifier: Apache-2.0
"""Whether the loss of a training is no number any more, by the lines of its output. Pure.

Once weights are no numbers, no later loss is one, and a training goes on so for days and ends well.
One step alone may be skipped by a loss scaler, and ranks may each tell of it: what counts is that
the losses of two steps in a row are none.

`step 120 | loss nan`, `{'loss': nan, 'epoch': 0.02}`, `train_loss=inf`, `lm loss: tensor(nan, …)`
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from slurm_health.training.diagnosis.collected import Collected
from slurm_health.training.diagnosis.inference import Attribution, Inference, Sureness

NOT_A_NUMBER = "not-a-number"
_IN_A_ROW = 2
_LINE_CHARACTERS = 300
_LOSS = re.compile(
    r"(?<![a-z])loss['\"]?\s{0,3}(?:[:=]|is)?\s{0,3}(?:tensor\()?"
    r"(?P<value>nan\b|[-+]?inf(?:inity)?\b|[-+]?\d)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"\[?(?:rank\s?)?\d{1,6}\]?:\s", re.IGNORECASE)  # of a launcher
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class LossIsNone(msgspec.Struct, frozen=True, kw_only=True):
    """The first line and the latest one of those in a row whose loss is no number."""

    first: str
    line: str


@dataclass
class Losses:
    """Follows the losses that one file tells; says once that they are no numbers."""

    first: str = ""
    told: bool = False
    _steps: int = 0
    _latest: tuple[str, ...] = ()

    def take(self, text: str) -> LossIsNone | None:
        """Take in a line; return what is known where this is the first to show it."""
        line = text[:_LINE_CHARACTERS]
        loss = _LOSS.search(line)
        if loss is None:
            return None
        if loss["value"][-1].isdigit():
            self.first, self._steps, self._latest = "", 0, ()
            return None
        step = _step(line, loss.start())
        if step and step != self._latest:
            self.first = self.first or line.strip()
            self._latest = step
            self._steps += 1
        if self._steps < _IN_A_ROW or self.told:
            return None
        self.told = True
        return LossIsNone(first=self.first, line=line.strip())


def _step(line: str, end: int) -> tuple[str, ...]:
    """Return the numbers that tell of which step a line is: those before its loss, or all."""
    label = _LABEL.match(line)
    begin = label.end() if label else 0
    return tuple(_NUMBER.findall(line, begin, end) or _NUMBER.findall(line, begin))


def observe_losses(data: Collected) -> Inference | None:
    """Return that the loss is no number as an inference; no node is named for it."""
    seen = data.get(LossIsNone)
    if seen is None:
        return None
    return Inference(
        name=NOT_A_NUMBER,
        description="the loss is no number (NaN, or infinite) at one step after another",
        attribution=Attribution.USER,
        sureness=Sureness.LIKELY,
        evidence=(seen.first, seen.line),
        advice="look at the data, the learning rate and the loss scale, and go on from a checkpoint"
        " before the first of these lines",
    )
