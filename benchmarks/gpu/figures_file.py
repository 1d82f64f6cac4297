# SPDX-License-Identifier: Apache-2.0
"""What has been measured so far: one JSON file that a later call continues."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from benchmarks.gpu.machine import Facts, Unusable
from benchmarks.gpu.step import Figure

VERSION = 1


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `not_measured` says why there are no figures."""

    section: int
    step: str
    date: str
    elapsed_s: float
    figures: list[Figure] = []
    not_measured: str = ""

    @property
    def wrong(self) -> list[str]:
        """What is wrong, one line each."""
        return [f"{each.name}: {each.wrong}" for each in self.figures if each.wrong]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All steps so far, of one machine."""

    facts: Facts
    version: int = VERSION
    small: bool = False
    steps: list[Measured] = []

    def of(self, section: int, step: str) -> Measured | None:
        """Return what was measured in a step, None if it was not."""
        return next((e for e in self._said_of(section, step) if not e.not_measured), None)

    def why_not(self, section: int, step: str) -> str:
        """Return why a step gave nothing, empty if it did, or was not tried."""
        return "".join(each.not_measured for each in self._said_of(section, step))

    def _said_of(self, section: int, step: str) -> list[Measured]:
        return [each for each in self.steps if (each.section, each.step) == (section, step)]

    def with_step(self, done: Measured) -> Figures:
        """Return these figures and those of one more step, in place of what it said before."""
        others = [e for e in self.steps if (e.section, e.step) != (done.section, done.step)]
        steps = sorted([*others, done], key=lambda each: each.section)
        return msgspec.structs.replace(self, steps=steps)


def read(path: Path, facts: Facts, *, small: bool) -> Figures:
    """Return what is in the file, which need not be there.

    Raises:
        Unusable: it holds figures of something else, or is none of ours.
    """
    fresh = Figures(facts=facts, small=small)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Figures)
    except FileNotFoundError:
        return fresh
    except (OSError, msgspec.DecodeError) as err:
        raise Unusable(f"{path}: {err}; name another file with --output") from err
    if (found.version, found.facts, found.small) != (VERSION, facts, small):
        raise Unusable(
            f"{path} holds figures of another machine, torch or amount; move it away, or name"
            " another file with --output"
        )
    return found


def write(path: Path, figures: Figures) -> None:
    """Write the file as a whole.

    Raises:
        Unusable: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
        beside.replace(path)
    except OSError as err:
        raise Unusable(f"{path}: {err.strerror}; name another file with --output") from err
