# SPDX-License-Identifier: Apache-2.0
"""Runs that are done, a line of JSON each: what was ended goes on where it stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_FILE = "year.jsonl"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Which run it is. `days` is 0 for the recording's own length."""

    policy: str
    nodes: int
    seed: int
    halved: bool = False
    days: float = 0.0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its figures; `took_s` of a processor."""

    run: Run
    figures: dict[str, float]
    took_s: float


class Results:
    """The runs in one directory.

    Raises:
        OSError: it cannot be made or read.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / _FILE
        self.done = {each.run: each for each in self._read()}

    def _read(self) -> Iterator[Done]:
        if not self._path.exists():
            return
        for line in self._path.read_bytes().splitlines():
            try:
                yield msgspec.json.decode(line, type=Done)
            except msgspec.MsgspecError:
                continue  # it was being written when the command was ended: it is run again

    def add(self, done: Done) -> None:
        """Keep a run."""
        self.done[done.run] = done
        begun = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("ab") as file:
            # What was cut short stays a line of its own.
            file.write((b"\n" if begun else b"") + msgspec.json.encode(done) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def of(self, policy: str, nodes: int, *, halved: bool, days: float = 0.0) -> Sequence[Done]:
        """Return the runs of one cell of the table, by seed."""
        found = [
            done
            for run, done in self.done.items()
            if (run.policy, run.nodes, run.halved, run.days) == (policy, nodes, halved, days)
        ]
        return sorted(found, key=lambda done: done.run.seed)
