# SPDX-License-Identifier: Apache-2.0
"""Writes one file of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slurm_health.records.record_codec import encode
from slurm_health.records.records import Record
from slurm_health.system import private_files
from slurm_health.system.journal.files import opened, path_of, unusable


class Writer:
    """Appends to one file. Nobody else writes there."""

    def __init__(self, directory: Path, writer: str, clock: Callable[[], float]) -> None:
        self.path = path_of(directory, writer)
        self._name = writer
        self._clock = clock
        # A writer that takes over from a dead one (master, relaunched agent) goes on counting.
        self._next = _line_count(self.path)

    def append(self, *records: Record) -> None:
        """Append records as whole lines, in order, and make them visible to other nodes.

        Raises:
            JournalError: the file cannot be written; what was written of it is unknown.
        """
        lines = b""
        for record in records:
            entry_id = f"{self._name}:{self._next}"
            lines += encode(record, entry_id=entry_id, time_s=round(self._clock(), 4))
            self._next += 1
        try:
            self._write(lines)
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def copy(self, lines: bytes) -> None:
        """Append whole lines that the writer of this file has made elsewhere, as `append` does.

        Raises:
            JournalError: the file cannot be written; what was written of it is unknown.
        """
        self._next += lines.count(b"\n")
        try:
            self._write(lines)
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def _write(self, lines: bytes) -> None:
        with opened(self.path.parent, os.geteuid()) as run:
            try:
                self._write_in(run, lines)
            except FileNotFoundError:
                self._write_in(run, lines, make=True)

    def _write_in(self, run: int, lines: bytes, *, make: bool = False) -> None:
        flags = os.O_RDWR | os.O_APPEND
        with private_files.opened(run, self.path.name, flags, make=make) as file:
            if _ends_torn(file):
                lines = b"\n" + lines
            while lines:
                lines = lines[os.write(file, lines) :]
            os.fsync(file)


def _line_count(path: Path) -> int:
    try:
        with opened(path.parent, os.geteuid()) as run:
            return private_files.read(run, path.name).count(b"\n")
    except FileNotFoundError:
        return 0
    except OSError as err:
        raise unusable(path, "written", err) from err


def _ends_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
