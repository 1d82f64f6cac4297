# SPDX-License-Identifier: Apache-2.0
"""Reads what is new in the files of a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from slurm_health.records.errors import RecordTooNew
from slurm_health.records.record_codec import VERSION, Entry, NewerVersion, decode
from slurm_health.system import private_files
from slurm_health.system.journal.files import for_each, opened, path_of, unusable


class Reader:
    """Reads one file from where it stopped last time. A torn last line is left for later.

    With `of_anybody` it may be another user's than this process's. `damaged` counts the lines that
    were no records, and were skipped.
    """

    def __init__(self, directory: Path, writer: str, *, of_anybody: bool = False) -> None:
        self.path = path_of(directory, writer)
        self._owner = None if of_anybody else os.geteuid()
        self._offset = 0
        self.damaged = 0

    def read_new(self) -> list[Entry]:
        """Return the entries that have appeared since the last call; none if there is no file.

        Lines that are not records are skipped: a writer that died left them torn.

        Raises:
            RecordTooNew: a newer slurm-health wrote here.
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        try:
            with opened(self.path.parent, self._owner) as run:
                return self.take(self.fetch(run))
        except FileNotFoundError:
            return []
        except OSError as err:
            raise unusable(self.path, "read", err) from err

    def fetch(self, run: int) -> bytes:
        """Return what is new in the file, in the run's directory that is held open.

        Raises:
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        try:
            return private_files.read(run, self.path.name, offset=self._offset, owner=self._owner)
        except FileNotFoundError:
            return b""
        except OSError as err:
            if err.errno == errno.ESTALE:  # replaced on the server since; the next open sees it
                return b""
            raise unusable(self.path, "read", err) from err

    def take(self, data: bytes) -> list[Entry]:
        """Return the entries in what was fetched.

        Raises:
            RecordTooNew: a newer slurm-health wrote here.
        """
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._decode(whole)

    def _decode(self, data: bytes) -> list[Entry]:
        entries = []
        for line in data.splitlines():
            try:
                entries.append(decode(line))
            except NewerVersion as err:
                raise RecordTooNew(self.path, err.version, VERSION) from err
            except ValueError:
                self.damaged += 1
        return entries


def read_new_of(directory: Path, readers: Sequence[Reader]) -> Iterator[Entry]:
    """Yield what is new in several files of one run, which are opened many at a time.

    Raises:
        RecordTooNew: a newer slurm-health wrote there.
        JournalError: a file is there and cannot be read, or is not to be trusted.
    """
    try:
        with opened(directory, os.geteuid()) as run:
            fetched = for_each(lambda reader: reader.fetch(run), readers)
    except OSError as err:
        raise unusable(directory, "read", err) from err
    for reader, data in zip(readers, fetched, strict=True):
        yield from reader.take(data)


def read_all(directory: Path, writer: str, *, of_anybody: bool = False) -> list[Entry]:
    """Return all entries of one writer's file, none if there is no such file."""
    return Reader(directory, writer, of_anybody=of_anybody).read_new()
