# SPDX-License-Identifier: Apache-2.0
"""A run's files: one per writer, written record by record, and read from the last position on.

They are opened only if no other user can have changed them.
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

# So many requests in parallel do no harm to a network filesystem: NFS clients of Linux begin with
# 16, and go up to 64 if the server allows (nfs(5)).
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
    """Make a run's directory, private to its owner, and an empty file per writer without one.

    Every expected file exists before any reader opens it, so that no client caches its absence.

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
    """Lock a run against other masters; return the open file, None if another holds the lock.

    As filelock does, which takes longer to load than a session to start.

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
    """Return the results in the order of the items; many items are processed in parallel."""
    if len(items) < _MANY:
        return [work(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor  # agents and hooks never need it

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        shares = [items[start::AT_A_TIME] for start in range(AT_A_TIME)]
        done = list(pool.map(lambda share: [work(item) for item in share], shares))
    return [done[at % AT_A_TIME][at // AT_A_TIME] for at in range(len(items))]


def unusable(path: Path, done: str, err: OSError) -> JournalError:
    """Return the error for a file that could not be "written" or "read"."""
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
    """Wait in a child for an answer of the filesystem.

    Raises:
        JournalError: it did not answer.
    """

    def ask() -> bytes:
        os.statvfs(root)
        return b""

    if isinstance(run_one(ask, limit_s), Hung):
        raise JournalError(root, f"its filesystem did not answer within {limit_s:g} s")


class Writer:
    """The only writer of one file. It appends."""

    def __init__(self, directory: Path, writer: str, clock: Callable[[], float]) -> None:
        self.path = path_of(directory, writer)
        self._name = writer
        self._clock = clock
        # The successor of a dead writer (master, relaunched agent) continues its numbers.
        self._next = 0
        try:
            with opened(directory, os.geteuid()) as run:
                self._next = private_files.read(run, self.path.name).count(b"\n")
        except FileNotFoundError:
            pass
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def append(self, *records: Record) -> tuple[int, bytes]:
        """Append records as whole lines, in order, and make them visible to other nodes.

        Return where in the file they begin, and what was written.

        Raises:
            JournalError: the file cannot be written, or only a part of the records.
        """
        lines = b""
        for record in records:
            entry_id = f"{self._name}:{self._next}"
            lines += encode(record, entry_id=entry_id, time_s=round(self._clock(), 4))
            self._next += 1
        return self._write(lines)

    def copy(self, lines: bytes) -> None:
        """Append whole lines that the writer of this file has made elsewhere, as `append` does.

        Raises:
            JournalError: the file cannot be written, or only a part of the lines.
        """
        self._next += lines.count(b"\n")
        self._write(lines)

    def _write(self, lines: bytes) -> tuple[int, bytes]:
        try:
            with opened(self.path.parent, os.geteuid()) as run:
                try:
                    return self._write_in(run, lines)
                except FileNotFoundError:
                    return self._write_in(run, lines, make=True)
        except OSError as err:
            raise unusable(self.path, "written", err) from err

    def _write_in(self, run: int, lines: bytes, *, make: bool = False) -> tuple[int, bytes]:
        flags = os.O_RDWR | os.O_APPEND
        with private_files.opened(run, self.path.name, flags, make=make) as file:
            size = os.fstat(file).st_size
            if size > 0 and os.pread(file, 1, size - 1) != b"\n":
                lines = b"\n" + lines  # ends the torn line of a dead writer
            left = lines
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        return size, lines


class Reader:
    """Reads one file from its last position on. A torn last line is left for later.

    With `of_anybody` the file may be another user's. `damaged` counts the lines that were no
    records, and were skipped. `gap`: there is more in the file than was received.
    """

    def __init__(self, directory: Path, writer: str, *, of_anybody: bool = False) -> None:
        self.path = path_of(directory, writer)
        self._owner = None if of_anybody else os.geteuid()
        self._offset = 0
        self._received = b""  # from the last position on
        self.gap = False
        self.damaged = 0

    def receive(self, begins: int, data: bytes) -> None:
        """Take note of bytes of the file that came another way; without `data` only of a gap."""
        known = self._offset + len(self._received)
        if data and begins == known:
            self._received += data
        elif not data or begins + len(data) > known:
            self.gap = True

    def read_new(self) -> list[Entry]:
        """Return the entries since the last call; none without a file.

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
        """Return the new bytes of the file, in the run's open directory.

        Raises:
            JournalError: the file is there and cannot be read, or is not to be trusted.
        """
        self.gap = False
        try:
            return private_files.read(run, self.path.name, offset=self._offset, owner=self._owner)
        except FileNotFoundError:
            return b""
        except OSError as err:
            if err.errno == errno.ESTALE:  # replaced on the server; the next open gets the new one
                return b""
            raise unusable(self.path, "read", err) from err

    def take(self, data: bytes) -> list[Entry]:
        """Return the entries in fetched bytes, or in those received where these are more.

        Raises:
            RecordTooNew: a newer slurm-health wrote here.
        """
        data = max(data, self._received, key=len)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._received = data[len(whole) :]
        entries = []
        for line in whole.splitlines():
            try:
                entries.append(decode(line))
            except NewerVersion as err:
                raise RecordTooNew(self.path, err.version, VERSION) from err
            except ValueError:
                self.damaged += 1
        return entries


def read_new_of(
    directory: Path, readers: Sequence[Reader], *, received: bool = False
) -> Iterator[list[Entry]]:
    """Yield the new entries of several files of one run, which are read in parallel.

    With `received`, a file is read only if something is missing in what was received of it.

    Raises:
        RecordTooNew: a newer slurm-health wrote there.
        JournalError: a file is there and cannot be read, or is not to be trusted.
    """
    to_read = [reader for reader in readers if reader.gap or not received]
    fetched: Iterable[bytes] = ()
    if to_read:
        try:
            with opened(directory, os.geteuid()) as run:
                fetched = for_each(lambda reader: reader.fetch(run), to_read)
        except OSError as err:
            raise unusable(directory, "read", err) from err
    data_of = dict(zip(to_read, fetched, strict=True))
    for reader in readers:
        yield reader.take(data_of.get(reader, b""))


def read_all(directory: Path, writer: str, *, of_anybody: bool = False) -> list[Entry]:
    """Return all entries of one writer's file, none if there is no such file."""
    return Reader(directory, writer, of_anybody=of_anybody).read_new()
