# SPDX-License-Identifier: Apache-2.0
"""What all nodes keep together in `breaker.directory`: the breaker's ledger, and the marks.

Whoever changes something holds one lock, in a child with a time limit. When the lock cannot be
had, or a file cannot be read, written or trusted, nothing is drained.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurm_health.core.node import accusations
from slurm_health.core.node.accusations import Mark
from slurm_health.core.node.breaker import (
    Allowed,
    Entry,
    Ledger,
    Refused,
    refusal,
    reserve,
    take_back,
)
from slurm_health.core.node.settings import Breaker
from slurm_health.killable import Answered, Broke, Hung
from slurm_health.site_file import others_can_write
from slurm_health.site_settings import Site
from slurm_health.stuck import Stuck, run_guarded

LEDGER = "ledger.json"
_MARKS = "marks"
# What a child that asks for the shared directory is called. No check has a name with a space.
STUCK = "shared directory"
# What a change takes beside the wait for its lock.
MARGIN_S = 3.0
_NODE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_LEDGER_BYTES = 16 << 20


class Unusable(Exception):
    """What is kept cannot be used: not root's alone, silent, locked for too long, or garbled."""


class Damaged(Unusable):
    """The ledger is there and cannot be understood."""


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a drain may happen: not, where `why_not` says so. It is the `today`th of a day."""

    why_not: str = ""
    today: int = 0


def known_refusal(site: Site, wanted: Entry) -> str:
    """Say why the ledger rules a drain out as it is; empty when Slurm has to be asked.

    Without the lock, and in a child: when a whole cluster fails, this is all that most nodes do.
    """

    def look() -> bytes:
        return refusal(read_ledger(site.breaker), wanted, site.breaker).encode()

    try:
        return _in_child(site, look).decode()
    except Unusable as err:
        return _unusable(err)


def reserve_drain(
    site: Site, wanted: Entry, *, members: dict[str, list[str]], ours: list[str]
) -> Reserved:
    """Count a drain before it happens, if it may."""

    def decide(ledger: Ledger) -> tuple[Ledger, bytes]:
        match reserve(ledger, wanted, limits=site.breaker, members=members, ours=ours):
            case Allowed(ledger=after, today=today):
                return after, msgspec.json.encode(Reserved(today=today))
            case Refused(why=why, ledger=after):
                return after, msgspec.json.encode(Reserved(why_not=why))

    try:
        return msgspec.json.decode(change_ledger(site, decide), type=Reserved)
    except Unusable as err:
        return Reserved(why_not=_unusable(err))


def _unusable(err: Unusable) -> str:
    return f"could not use the breaker's ledger: {err}"


def cancel_drain(site: Site, node: str, time_s: float) -> None:
    """Take back a drain that did not happen. Where that fails, it goes on counting."""
    with contextlib.suppress(Unusable):
        change_ledger(site, lambda ledger: (take_back(ledger, node, time_s), b""))


def change_ledger(site: Site, decide: Callable[[Ledger], tuple[Ledger, bytes]]) -> bytes:
    """Change the ledger under the lock; return what `decide` answered.

    Raises:
        Unusable: it could not be done, and why. The ledger may or may not count the change.
    """

    def work(shared: Path) -> bytes:
        before = _read_ledger(shared)
        after, answer = decide(before)
        if after != before:
            publish(shared / LEDGER, msgspec.json.encode(after))
        return answer

    return _under_lock(site, work)


def clear_ledger(site: Site) -> None:
    """Begin a new ledger, whatever the old one has come to.

    Raises:
        Unusable: it could not be done, and why.
    """

    def work(shared: Path) -> bytes:
        publish(shared / LEDGER, msgspec.json.encode(Ledger()))
        return b""

    _under_lock(site, work)


def read_ledger(settings: Breaker) -> Ledger:
    """Return the ledger, an empty one where there is no file.

    Raises:
        Unusable: it is there and cannot be read.
    """
    return _read_ledger(shared_directory(settings))


def _read_ledger(shared: Path) -> Ledger:
    path = shared / LEDGER
    try:
        return msgspec.json.decode(path.read_bytes()[:_LEDGER_BYTES], type=Ledger)
    except FileNotFoundError:
        return Ledger()
    except msgspec.DecodeError as err:
        raise Damaged(f"{path} is damaged: {err}; mend it with: slurm-health nodes reset") from err
    except OSError as err:
        raise Unusable(f"{path} cannot be read: {err.strerror}") from err


def add_mark(site: Site, node: str, mark: Mark) -> tuple[Mark, ...]:
    """Add a mark to a node's and return all that are alive.

    Raises:
        Unusable: they cannot be kept; the mark is lost.
    """

    def work(shared: Path) -> bytes:
        path = _marks_of(shared, node)
        path.parent.mkdir(mode=0o755, exist_ok=True)
        after = accusations.add(_read_marks(path), mark, site.marks)
        publish(path, msgspec.json.encode(after))
        return msgspec.msgpack.encode(after)

    return msgspec.msgpack.decode(_under_lock(site, work), type=tuple[Mark, ...])


def marks_of(settings: Breaker, node: str) -> tuple[Mark, ...]:
    """Return a node's marks, the old ones too.

    Raises:
        Unusable: they cannot be read.
    """
    return _read_marks(_marks_of(shared_directory(settings), node))


def marked_nodes(settings: Breaker) -> list[str]:
    """Return the nodes that have a file of marks.

    Raises:
        Unusable: the shared directory cannot be used.
    """
    return sorted(each.stem for each in (shared_directory(settings) / _MARKS).glob("*.json"))


def forget_marks(settings: Breaker, node: str) -> None:
    """Remove a node's marks.

    Raises:
        Unusable: the shared directory cannot be used.
    """
    _marks_of(shared_directory(settings), node).unlink(missing_ok=True)


def _marks_of(shared: Path, node: str) -> Path:
    if not _NODE.fullmatch(node):
        raise Unusable(f"{node!r} is not the name of a node")
    return shared / _MARKS / f"{node}.json"


def _read_marks(path: Path) -> tuple[Mark, ...]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Mark, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as err:
        raise Unusable(f"{path} cannot be read: {err}") from err


def shared_directory(settings: Breaker) -> Path:
    """Return the shared directory.

    Raises:
        Unusable: there is none, or others than its owner, root or whoever asks, can write there.
    """
    if not settings.directory:
        raise Unusable("breaker.directory is not set")
    path = Path(settings.directory)
    try:
        found = path.lstat()
    except OSError as err:
        raise Unusable(f"{path}: {err.strerror}") from err
    if not stat.S_ISDIR(found.st_mode):
        raise Unusable(f"{path} is not a directory")
    if others_can_write(found):
        raise Unusable(f"{path} can be written by others than root")
    return path


def _under_lock(site: Site, work: Callable[[Path], bytes]) -> bytes:
    """Work on the shared directory with its lock held, in a child; return its answer."""

    def locked() -> bytes:
        shared = shared_directory(site.breaker)
        with held(shared / "lock", site.breaker.lock_limit_s):
            return work(shared)

    return _in_child(site, locked)


def _in_child(site: Site, work: Callable[[], bytes]) -> bytes:
    directory = site.breaker.directory
    match run_guarded(site.state, STUCK, work, site.breaker.lock_limit_s + MARGIN_S):
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise Unusable(reason)
        case Hung(limit_s=limit_s):
            raise Unusable(f"{directory} did not answer within {limit_s:g} s")
        case Stuck(pid=pid):
            raise Unusable(f"{directory}: process {pid} of an earlier run waits in the kernel")


@contextlib.contextmanager
def held(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock.

    Raises:
        Unusable: another holds it for too long.
        OSError: it cannot be made.
    """
    # Loaded here: a node that is well never needs it.
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=limit_s, mode=0o600)
    try:
        lock.acquire()
    except Timeout as err:
        raise Unusable(f"{path} is held by another for more than {limit_s:g} s") from err
    try:
        yield
    finally:
        lock.release()


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
