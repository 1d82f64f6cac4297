# SPDX-License-Identifier: Apache-2.0
"""A run's files: one per writer, and each opened as its owner's alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from slurm_health.records.errors import JournalError
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
