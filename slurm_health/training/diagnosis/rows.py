# SPDX-License-Identifier: Apache-2.0
"""A row of the table that leads from words to causes, and the types of Python's exceptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto

from slurm_health.training.framework import Attribution, Inference, Sureness

# Exceptions that Python raises for a program's own mistakes, whatever their words.
OF_THE_PROGRAM = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
# Exceptions that the files and packages of a node may cause.
OF_THE_PLACE = frozenset(
    {
        "FileNotFoundError",
        "ImportError",
        "IsADirectoryError",
        "ModuleNotFoundError",
        "NotADirectoryError",
        "OSError",
        "PermissionError",
    }
)
_END_OF_NAME = re.compile(r"(?<!:):(?!:)")  # two colons are C++'s, within the name


class On(Flag):
    """The uses of a row beside the exception of a rank."""

    EXCEPTION = 0
    LAST_WORDS = auto()  # the words are unambiguous: they count without an exception
    SHARED = auto()  # nodes share its subject: if several fail so, it is no single node's
    ONE_NODE = auto()  # one of several nodes may lack files of the others
    CRASH = auto()  # a library writes it before a crash: it says more than the signal


@dataclass(frozen=True)
class Row:
    """Words, and their meaning.

    Args:
        name: of the cause.
        pattern: of the words.
        says: the cause, the end of a sentence.
        advice: what helps.
        blame: node, transient, user, outside or undecided.
        sureness: how sure the words are of it.
        unless: an exclusion: these words have another meaning.
        on: its further uses.
        codes: exit codes of a process that wrote it, empty for any.
    """

    name: str
    pattern: str
    says: str
    advice: str
    blame: Attribution = Attribution.UNDECIDED
    sureness: Sureness = Sureness.LIKELY
    unless: Callable[[str], bool] = lambda _: False
    on: On = On.EXCEPTION
    codes: frozenset[int] = frozenset()

    def fits(self, text: str) -> bool:
        """Return whether a text has the words."""
        return re.search(self.pattern, text) is not None and not self.unless(text)

    def inference(
        self,
        names: Mapping[str, str] | None = None,
        *,
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        evidence: tuple[str, ...] = (),
    ) -> Inference:
        """Return its cause; `names` fill its sentences."""
        return Inference(
            name=self.name,
            attribution=self.blame,
            description=self.says.format(**names) if names else self.says,
            sureness=self.sureness,
            nodes=nodes,
            ranks=ranks,
            evidence=evidence,
            advice=self.advice.format(**names) if names else self.advice,
        )


def kind_of(error: str) -> str:
    """Return the name of an exception without its module or namespace: `KeyError`."""
    name = _END_OF_NAME.split(error, maxsplit=1)[0]
    return name.rpartition(".")[2].rpartition("::")[2].strip()


def alike(error: str) -> str:
    """Return an exception without figures and addresses, which differ between ranks."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)
