# SPDX-License-Identifier: Apache-2.0
"""What `slurm-health doctor` has to say: what is so, why it matters, what to do about it."""

from __future__ import annotations

import textwrap
from enum import Enum

import msgspec


class Urgency(Enum):
    """How bad it is. `CHANGE` alone makes doctor end with 1."""

    CHANGE = "change"
    LOOK = "look"
    FINE = "fine"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is fine, worth a look, or to be changed. `do` is empty for what is fine."""

    level: Urgency
    text: str
    do: str = ""


def fine(text: str) -> Advice:
    """Return that something is as it should be."""
    return Advice(level=Urgency.FINE, text=text)


def look(text: str, do: str) -> Advice:
    """Return that something may be intended, and has a price."""
    return Advice(level=Urgency.LOOK, text=text, do=do)


def change(text: str, do: str) -> Advice:
    """Return that something must be changed."""
    return Advice(level=Urgency.CHANGE, text=text, do=do)


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the doctor has to say."""

    advice: tuple[Advice, ...]

    def count(self, level: Urgency) -> int:
        """Return how many pieces of advice have this level."""
        return sum(each.level is level for each in self.advice)

    @property
    def ranked(self) -> list[Advice]:
        """The worst first."""
        return sorted(self.advice, key=lambda each: list(Urgency).index(each.level))

    def text(self, width: int | None) -> str:
        """Return it for a person, in lines of `width`."""
        lines = []
        for each in self.ranked:
            lines += _paragraph(f"{each.level.value:<8}", each.text, width)
            if each.do:
                lines += _paragraph(f"{'':<8}do: ", each.do, width)
        counts = [f"{self.count(level)} to {word}" for level, word in _COUNTED]
        lines += ["", f"{', '.join(counts)}, {self.count(Urgency.FINE)} fine"]
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """Return it for a program."""
        counts = {level.value: self.count(level) for level in Urgency}
        data = msgspec.json.encode({"counts": counts, "advice": self.ranked})
        return msgspec.json.format(data, indent=2).decode() + "\n"


_COUNTED = ((Urgency.CHANGE, "change"), (Urgency.LOOK, "look at"))


def _paragraph(head: str, text: str, width: int | None) -> list[str]:
    if width is None:
        return [head + text]
    return textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
