# SPDX-License-Identifier: Apache-2.0
"""A value that many nodes change at once, and locks.

The value is on a network filesystem whose clients cache names and contents: a new value is a new
file with the next number, made by a hard link that fails if the number is taken. So a change of an
old value never takes effect, whatever caches and locks do; it is made again on the new value.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.system.private_files import publish

T = TypeVar("T")
A = TypeVar("A")

# A ledger of 1,000 drains, with causes of 500 characters, has 1 MB.
_MOST_BYTES = 16 << 20
# Older values that stay, for readers that have just listed the directory.
_KEPT = 3
# A change is retried while others come first: under the lock that is once or twice.
_MOST_TRIES = 50
_ROOT_ONLY = 0o600


class StoreUnusable(Exception):
    """A value cannot be read, written or locked; the text says which, and why."""


class StoreDamaged(StoreUnusable):
    """A file is there, and its content cannot be understood."""


class StoreForRoot(StoreUnusable):
    """Only root may read or write it."""


class SharedStore(Generic[T]):
    """One value that many nodes change, as the files `NAME.1`, `NAME.2`, ... of a directory.

    The value is in the file with the largest number.
    """

    def __init__(self, directory: Path, name: str, kind: type[T]) -> None:
        self.directory = directory
        self._kind = kind
        self._name = name
        self._numbered = re.compile(rf"{re.escape(name)}\.(\d{{1,18}})", re.ASCII)

    def load(self) -> T | None:
        """Return the value, None if nothing was ever saved.

        A value that was replaced in the meantime may be returned, as with any reader.

        Raises:
            StoreDamaged: it cannot be understood.
            StoreForRoot: only root may read it.
            StoreUnusable: it cannot be read.
        """
        return self._read(self._latest())[1]

    def update(
        self, change: Callable[[T | None], tuple[T, A]], *, lock_limit_s: float, anew: bool = False
    ) -> A:
        """Replace the value; return the answer of `change`.

        `change` may be called again if another node came first. The lock only makes that rare:
        without it, for example if its holder hangs, the change is made as well.

        Args:
            change: takes the value, and returns the new one and an answer, without side effects.
            lock_limit_s: timeout of the lock.
            anew: begin with None if the value is damaged.

        Raises:
            StoreUnusable: it cannot be read or replaced.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(StoreUnusable):
                stack.enter_context(lock(self.directory / "lock", lock_limit_s))
            number = self._latest()
            for _ in range(_MOST_TRIES):
                try:
                    number, before = self._read(number)
                except StoreDamaged:
                    if not anew:
                        raise
                    before = None
                after, answer = change(before)
                if after == before or self._link(number + 1, after):
                    with contextlib.suppress(OSError):
                        for old in self._numbers():
                            if old < number + 2 - _KEPT:
                                self._path(old).unlink()
                    return answer
                number = max(number + 1, self._latest())
        raise StoreUnusable(f"{self.directory / self._name}: others changed it all the time")

    def _latest(self) -> int:
        """Return the largest number, 0 for none."""
        try:
            return max(self._numbers(), default=0)
        except OSError as err:
            raise _refused(self.directory, "listed", err) from err

    def _numbers(self) -> list[int]:
        """List the numbers anew: a client may serve known names from its cache, but no new ones."""
        names = os.listdir(self.directory)  # noqa: PTH208 - names alone are needed
        return [int(match[1]) for name in names if (match := self._numbered.fullmatch(name))]

    def _read(self, number: int) -> tuple[int, T | None]:
        """Return the value with this number, or a later one if that is gone already."""
        for _ in range(_MOST_TRIES):
            if number == 0:
                return 0, None
            path = self._path(number)
            try:
                return number, _decoded(path, path.read_bytes(), self._kind)
            except OSError as err:
                latest = self._latest()
                if latest <= number:
                    raise _refused(path, "read", err) from err
                number = latest
        raise StoreUnusable(f"{self.directory / self._name}: others changed it all the time")

    def _link(self, number: int, value: T) -> bool:
        """Save a value under a number; return whether no other node has taken it."""
        fresh = self.directory / f".{self._name}.{os.urandom(8).hex()}"
        try:
            publish(fresh, msgspec.json.encode(value), mode=_ROOT_ONLY)
            try:
                os.link(fresh, self._path(number))
            except FileExistsError:
                # After a late answer of the server the client retries, and meets its own link.
                return fresh.stat().st_nlink > 1
            finally:
                with contextlib.suppress(OSError):
                    fresh.unlink()
        except OSError as err:
            raise _refused(self._path(number), "written", err) from err
        return True

    def _path(self, number: int) -> Path:
        return self.directory / f"{self._name}.{number}"


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    if len(data) > _MOST_BYTES:
        raise StoreDamaged(f"{path} has {len(data)} bytes, limit {_MOST_BYTES}")
    try:
        return from_json(data, kind)
    except msgspec.DecodeError as err:
        raise StoreDamaged(f"{path} is damaged: {err}") from err


def _refused(path: Path, what: str, err: OSError) -> StoreUnusable:
    if isinstance(err, PermissionError):
        return StoreForRoot(f"{path} can be {what} by root only")
    return StoreUnusable(f"{path} cannot be {what}: {err.strerror}")


@contextlib.contextmanager
def lock(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock file against other processes, on other nodes too.

    Raises:
        StoreUnusable: another has held it for longer than `limit_s`, or it cannot be made.
    """
    # Loaded here: a healthy node needs none.
    from filelock import FileLock, Timeout

    held = FileLock(path, timeout=limit_s, mode=_ROOT_ONLY)
    try:
        held.acquire()
    except Timeout as err:
        raise StoreUnusable(f"{path} is held by another for more than {limit_s:g} s") from err
    except OSError as err:
        raise _refused(path, "locked", err) from err
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a lock file of this node if it is free; yield whether it was, without waiting.

    Children close what they inherit, so that a stuck child does not hold the lock.

    Raises:
        OSError: the file cannot be made.
    """
    import fcntl

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others can enter the directory, and anyone who may open a file can hold its lock.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _ROOT_ONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(file)
