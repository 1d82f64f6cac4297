# SPDX-License-Identifier: Apache-2.0
"""The advice of `slurm-health doctor`: a fact, why it matters, and what to do about it."""

from __future__ import annotations

import textwrap
from enum import Enum

import msgspec


class Urgency(Enum):
    """The urgency of advice. `CHANGE` alone makes doctor exit with 1."""

    CHANGE = "change"
    LOOK = "look"
    FINE = "fine"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is fine, worth a look, or to be changed. `do` is empty for what is fine."""

    level: Urgency
    text: str
    do: str = ""


def fine(text: str) -> Advice:
    """Return advice that nothing has to be done."""
    return Advice(level=Urgency.FINE, text=text)


def look(text: str, do: str) -> Advice:
    """Return advice about something that may be intended, and has a price."""
    return Advice(level=Urgency.LOOK, text=text, do=do)


def change(text: str, do: str) -> Advice:
    """Return advice to change something."""
    return Advice(level=Urgency.CHANGE, text=text, do=do)


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All advice."""

    advice: tuple[Advice, ...]

    def count(self, level: Urgency) -> int:
        """Return how many pieces of advice have this level."""
        return sum(advice.level is level for advice in self.advice)

    @property
    def ranked(self) -> list[Advice]:
        """The worst first."""
        return sorted(self.advice, key=lambda advice: list(Urgency).index(advice.level))

    def text(self, width: int | None) -> str:
        """Return the report as text, in lines of `width`, or of any length."""
        lines = []
        for advice in self.ranked:
            parts = {f"{advice.level.value:<8}": advice.text, f"{'':<8}do: ": advice.do}
            for head, text in parts.items():
                if text:
                    lines += textwrap.wrap(
                        text,
                        max(width or 1 << 16, 40),
                        initial_indent=head,
                        subsequent_indent=" " * len(head),
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
        counts = (
            f"{self.count(Urgency.CHANGE)} to change, {self.count(Urgency.LOOK)} to look at,"
            f" {self.count(Urgency.FINE)} fine"
        )
        return "\n".join([*lines, "", counts]) + "\n"

    def json(self) -> str:
        """Return the report as JSON."""
        counts = {level.value: self.count(level) for level in Urgency}
        data = msgspec.json.encode({"counts": counts, "advice": self.ranked})
        return msgspec.json.format(data, indent=2).decode() + "\n"
