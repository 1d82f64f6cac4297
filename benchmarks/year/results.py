# SPDX-License-Identifier: Apache-2.0
"""Runs that are done, a line of JSON each: what was ended goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import msgspec

_FILE = "year.jsonl"


class Doubt(Enum):
    """Which assumption is doubted."""

    NONE = ""
    HALVED = "halved"  # tests and post-mortems see half of what they are taken to
    QUICK = "quick"  # persons find a bad node in a quarter of the time


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Which run it is. `days` is 0 for the recording's own length."""

    policy: str
    nodes: int
    seed: int
    doubt: Doubt = Doubt.NONE
    days: float = 0.0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its figures; `took_s` of a processor."""

    run: Run
    figures: dict[str, float]
    took_s: float


def read(data: bytes) -> Iterator[Done]:
    """Yield the runs of a file; a line that was cut short is none, and is run again."""
    for line in data.splitlines():
        try:
            yield msgspec.json.decode(line, type=Done)
        except msgspec.MsgspecError:
            continue


def write(path: Path, runs: Sequence[Done]) -> None:
    """Write runs, a line each."""
    path.write_bytes(b"".join(msgspec.json.encode(done) + b"\n" for done in runs))


class Results:
    """The runs in one directory.

    Raises:
        OSError: it cannot be made or read.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / _FILE
        found = read(self._path.read_bytes()) if self._path.exists() else ()
        self.done = {each.run: each for each in found}

    def add(self, done: Done) -> None:
        """Keep a run."""
        self.done[done.run] = done
        begun = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("ab") as file:
            # What was cut short stays a line of its own.
            file.write((b"\n" if begun else b"") + msgspec.json.encode(done) + b"\n")
            file.flush()
            os.fsync(file.fileno())
