# SPDX-License-Identifier: Apache-2.0
"""A run's files: one per writer, and each opened as its owner's alone.

They are written a record at a time, and what is new in them is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from slurm_health.records.errors import JournalError, RecordTooNew
from slurm_health.records.record_codec import VERSION, Entry, NewerVersion, decode, encode
from slurm_health.records.records import Record
from slurm_health.system import private_files
from slurm_health.system.killable import Hung, run_one

MASTER = "master"
SUPERVISOR = "supervisor"
REQUEUE = "requeue"
POST_MORTEM = "post-mortem"
RESTART = "restart"
MONITOR = "monitor"

_LOCK = "master.lock"

# A client of a network filesystem waits for so many answers of its server without harm: NFS clients
# of Linux begin with 16 requests at a time, and go up to 64 where the server allows (nfs(5)).
AT_A_TIME = 32
_MANY = 64  # fewer files than this take less than starting threads would

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


# A server that fails over is back sooner.
ANSWER_LIMIT_S = 60.0


def path_of(directory: Path, writer: str) -> Path:
    """Return the file of one writer: a node's name, or one of the constants above."""
    return directory / _name_of(writer)


def create(directory: Path, writers: Iterable[str]) -> None:
    """Make a run's directory, private to its owner, and an empty file per writer that has none.

    Every expected file exists before any reader looks for it, so that no client caches its
    absence.

    Raises:
        JournalError: the directory or a file cannot be written.
    """
    try:
        with opened(directory, os.geteuid(), make=True) as run:

            def make(writer: str) -> None:
                with private_files.opened(run, _name_of(writer), make=True):
                    pass

            for_each(make, list(writers))
    except OSError as err:
        raise unusable(directory, "written", err) from err


def opened(
    directory: Path, owner: int | None, *, make: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Hold open a run's directory, the third one below the root, which must be this owner's.

    Raises:
        OSError: it cannot be opened, or is refused.
    """
    *_, cluster, job, run = directory.parts
    return private_files.directory(directory.parents[2], cluster, job, run, owner=owner, make=make)


def lock(directory: Path) -> int | None:
    """Keep other masters away from a run: return what is open until it is closed, None if one is.

    As filelock does, which takes longer to load than the session that this keeps alone.

    Raises:
        OSError: the filesystem cannot lock.
    """
    held = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(held)
        if isinstance(err, BlockingIOError):
            return None
        raise
    return held


def for_each(work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """Return the results in the order of the items; of many, some are worked on at a time."""
    if len(items) < _MANY:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor  # agents and hooks never need it

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        shares = [items[start::AT_A_TIME] for start in range(AT_A_TIME)]
        done = list(pool.map(lambda share: [work(item) for item in share], shares))
    return [done[at % AT_A_TIME][at // AT_A_TIME] for at in range(len(items))]


def unusable(path: Path, done: str, err: OSError) -> JournalError:
    """Return the error to raise where a file could not be "written" or "read"."""
    problem = f"cannot be {done}: {err.strerror or err}"
    if done == "written":
        problem += "; choose a directory on a filesystem that all nodes share"
    elif err.errno == errno.EPERM:
        problem += "; have it removed, or choose another directory"
    else:
        return JournalError(path, problem)
    return JournalError(path, f"{problem} with --journal DIR or SLURM_HEALTH_JOURNAL")


def _name_of(writer: str) -> str:
    return f"{writer}.jsonl"


def await_answer(root: Path, limit_s: float = ANSWER_LIMIT_S) -> None:
    """Let a child ask the filesystem first.

    Raises:
        JournalError: it did not answer.
    """

    def ask() -> bytes:
        os.statvfs(root)
        return b""

    if isinstance(run_one(ask, limit_s), Hung):
        raise JournalError(root, f"its filesystem did not answer within {limit_s:g} s")


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
