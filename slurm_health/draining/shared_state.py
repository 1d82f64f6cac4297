# SPDX-License-Identifier: Apache-2.0
"""The breaker's ledger: one file that all nodes share, under one lock, in a child with a limit.

When the lock cannot be had, or the file cannot be read, written or trusted, nothing is drained.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.core.node import accusations
from slurm_health.core.node.accusations import Mark
from slurm_health.core.node.breaker import Allowed, Entry, Ledger, Refused, reserve, take_back
from slurm_health.core.node.settings import Breaker, Marks
from slurm_health.killable import Answered, Broke, Hung, Outcome, run_one

NAME = "ledger.json"
_ALLOWED = b"allowed"
_MARGIN_S = 3.0
_NODE = re.compile(r"[\w.-]+", re.ASCII)
_MOST_BYTES = 16 << 20


class Untrusted(Exception):
    """The shared directory is not root's alone, or what lies there cannot be read."""


def directory(settings: Breaker, *, owner: int = 0) -> Path:
    """Return the shared directory.

    Raises:
        Untrusted: there is none, or others than its owner can write there.
    """
    if not settings.directory:
        raise Untrusted("breaker.directory is not set")
    path = Path(settings.directory)
    try:
        found = path.lstat()
    except OSError as err:
        raise Untrusted(f"{path}: {err.strerror}") from err
    if not stat.S_ISDIR(found.st_mode):
        raise Untrusted(f"{path} is not a directory")
    if found.st_uid not in {0, owner} or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path} can be written by others than root")
    return path


def read(path: Path) -> Ledger:
    """Read the ledger; an empty one where there is no file.

    Raises:
        Untrusted: it is there and cannot be read.
    """
    try:
        data = (path / NAME).read_bytes()
    except FileNotFoundError:
        return Ledger()
    except OSError as err:
        raise Untrusted(f"{path / NAME}: {err.strerror}") from err
    try:
        return msgspec.json.decode(data[:_MOST_BYTES], type=Ledger)
    except msgspec.DecodeError as err:
        raise Untrusted(f"{path / NAME} cannot be read: {err}") from err


def write(path: Path, ledger: Ledger) -> None:
    """Replace the ledger."""
    publish(path / NAME, msgspec.json.encode(ledger))


def publish(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old one or the new one, whole."""
    fresh = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        with fresh.open("wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def change(
    settings: Breaker, decide: Callable[[Ledger], tuple[Ledger, bytes]], *, owner: int = 0
) -> bytes:
    """Change the ledger under its lock, in a child; return what `decide` answered.

    Raises:
        Untrusted: it could not be done, and why. The ledger may or may not count the change.
    """

    def work() -> bytes:
        path = directory(settings, owner=owner)
        with locked(path, settings.lock_limit_s):
            ledger, answer = decide(read(path))
            write(path, ledger)
        return answer

    match run_one(work, settings.lock_limit_s + _MARGIN_S):
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise Untrusted(reason)
        case Hung(limit_s=limit_s):
            raise Untrusted(f"{settings.directory} did not answer within {limit_s:g} s")


def locked(path: Path, limit_s: float) -> Any:
    """Return the lock of the shared directory, to be entered.

    Raises, when it is entered:
        Untrusted: it is held by another for too long.
    """
    # Loaded here: a node that is well never needs it.
    from filelock import FileLock, Timeout

    class Lock(FileLock):
        def __enter__(self) -> Any:
            try:
                return super().__enter__()
            except Timeout as err:
                text = f"{self.lock_file} is held by another for more than {limit_s:g} s"
                raise Untrusted(text) from err

    return Lock(path / "lock", timeout=limit_s, mode=0o600)


def try_reserve(
    settings: Breaker,
    wanted: Entry,
    *,
    members: dict[str, list[str]],
    ours: list[str],
    owner: int = 0,
) -> str:
    """Count a drain before it happens; return why it must not happen, empty when it may."""

    def decide(ledger: Ledger) -> tuple[Ledger, bytes]:
        match reserve(ledger, wanted, limits=settings, members=members, ours=ours):
            case Allowed(ledger=after):
                return after, _ALLOWED
            case Refused(why=why, ledger=after):
                return after, why.encode()

    try:
        answer = change(settings, decide, owner=owner)
    except Untrusted as err:
        return f"the breaker cannot be asked: {err}"
    return "" if answer == _ALLOWED else answer.decode()


def forget(settings: Breaker, node: str, time_s: float, *, owner: int = 0) -> None:
    """Take back a drain that did not happen. Where that fails, it goes on counting."""
    try:
        change(settings, lambda ledger: (take_back(ledger, node, time_s), b""), owner=owner)
    except Untrusted:
        return


def add(
    breaker: Breaker, node: str, mark: Mark, settings: Marks, *, owner: int = 0
) -> tuple[Mark, ...]:
    """Add a mark to a node's and return all that are alive.

    Raises:
        Untrusted: they cannot be kept; the mark is lost.
    """

    def work() -> bytes:
        place = _place(breaker, owner=owner, create=True)
        with locked(place, breaker.lock_limit_s):
            after = accusations.add(_load(place / _name(node)), mark, settings)
            publish(place / _name(node), msgspec.json.encode(after))
        return msgspec.msgpack.encode(after)

    return msgspec.msgpack.decode(
        _answer(run_one(work, breaker.lock_limit_s + _MARGIN_S)), type=tuple[Mark, ...]
    )


def load(breaker: Breaker, node: str, *, owner: int = 0) -> tuple[Mark, ...]:
    """Return a node's marks, the old ones too.

    Raises:
        Untrusted: they cannot be read.
    """
    return _load(_place(breaker, owner=owner) / _name(node))


def marked_nodes(breaker: Breaker, *, owner: int = 0) -> list[str]:
    """Return the nodes that have a file of marks.

    Raises:
        Untrusted: the shared directory cannot be used.
    """
    place = _place(breaker, owner=owner)
    if not place.is_dir():
        return []
    return sorted(each.stem for each in place.glob("*.json"))


def clear(breaker: Breaker, node: str, *, owner: int = 0) -> None:
    """Forget a node's marks.

    Raises:
        Untrusted: the shared directory cannot be used.
    """
    (_place(breaker, owner=owner) / _name(node)).unlink(missing_ok=True)


def _place(breaker: Breaker, *, owner: int, create: bool = False) -> Path:
    place = directory(breaker, owner=owner) / "marks"
    if create:
        place.mkdir(mode=0o755, exist_ok=True)
    return place


def _name(node: str) -> str:
    if not _NODE.fullmatch(node) or node.startswith("."):
        raise Untrusted(f"{node!r} is no node's name")
    return f"{node}.json"


def _load(path: Path) -> tuple[Mark, ...]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Mark, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as err:
        raise Untrusted(f"{path} cannot be read: {err}") from err


def _answer(outcome: Outcome) -> bytes:
    match outcome:
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise Untrusted(reason)
        case Hung(limit_s=limit_s):
            raise Untrusted(f"the shared directory did not answer within {limit_s:g} s")
