# SPDX-License-Identifier: Apache-2.0
"""How the values of options are written, on a command line as in a variable or a script's line."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from slurm_health.preflight import probe_choice
from slurm_health.preflight.localize import settings as localize

Value = str | int | bool
_LEAST_S, _MOST_S = 1, 3600  # of a round


@dataclass(frozen=True)
class ValueKind:
    """How a value is written: a flag where it has no `metavar` for a usage line.

    `read` returns what a text stands for, which reads back as itself, or raises ValueError.
    """

    metavar: str
    read: Callable[[str], Value]


def _flag(text: str) -> bool:
    if text.lower() in {"yes", "true", "1", ""}:
        return True
    if text.lower() in {"no", "false", "0"}:
        return False
    raise ValueError(f"expected yes or no, found {text!r}")


def _probes(text: str) -> str:
    return text if text == probe_choice.OFF else probe_choice.spelled_out(text, "--check")


def _path(what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not text:
            raise ValueError(f"expected {what}, found nothing")
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111 - text in, text out

    return read


def _interpreter(text: str) -> str:
    # A bare name is looked up on the job's PATH, which may differ from this one.
    return text if text and "/" not in text else _path("a Python interpreter")(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a whole number, 0 or more, found {text!r}")
    return int(text)


AUTO = "auto"


def _spares(text: str) -> Value:
    return AUTO if text == AUTO else _count(text)


def _nodes(text: str) -> int:
    if (nodes := _count(text)) > 0:
        return nodes
    raise ValueError("at least one node is needed")


def _round_deadline(text: str) -> str:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise ValueError(f"expected seconds, from {_LEAST_S} to {_MOST_S}, found {text!r}")
    return text


def one_of(choices: type[Enum]) -> ValueKind:
    """Return the kind that takes the value of one of these."""
    values = [each.value for each in choices]

    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"{text!r} is not one of {', '.join(values)}")
        return text

    return ValueKind("|".join(values), read)


def of_localize(option: localize.Option) -> ValueKind:
    """Return the kind that takes what a setting of the localisation takes."""

    def read(text: str) -> str:
        try:
            localize.settings_from({option.name: text}, kind=localize.Device.CPU)
        except ValueError as err:
            raise ValueError(str(err).removeprefix(f"{option.name}: ")) from None
        return text

    return ValueKind(option.kind.value, read)


FLAG = ValueKind("", _flag)
PROBES = ValueKind("WHAT[,WHAT...]", _probes)
DIRECTORY = ValueKind("DIR", _path("a directory"))
FILE = ValueKind("FILE", _path("a file"))
INTERPRETER = ValueKind("PATH", _interpreter)
COUNT, NODES = ValueKind("N", _count), ValueKind("N", _nodes)
SPARES = ValueKind(f"N|{AUTO}", _spares)
ROUND_DEADLINE = ValueKind("SECONDS", _round_deadline)
