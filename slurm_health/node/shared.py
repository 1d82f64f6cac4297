# SPDX-License-Identifier: Apache-2.0
"""The directory that all nodes share (`breaker.directory`), and the breaker's ledger in it.

Hooks use it in a child with a time limit. If a file cannot be read, written or trusted, nothing is
drained.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from slurm_health.node.rules.breaker import DrainLedger
from slurm_health.node.rules.settings import Breaker
from slurm_health.node.site import Site
from slurm_health.node.store import SharedStore, StoreDamaged, StoreForRoot, StoreUnusable
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.system.killable import Answered, Broke, Hung, Stuck, run_guarded
from slurm_health.system.private_files import publish
from slurm_health.system.site_file import others_can_write

__all__ = ["StoreDamaged", "StoreForRoot", "StoreSilent", "StoreUnusable"]

A = TypeVar("A")

_LEDGER = "ledger"
# The name of children that use the shared directory. No check has a name with a space.
_STUCK = "shared directory"
# What Slurm has drained by itself, as the last look at all nodes saw it; and who looks now.
SLURM_LIST, _LOOK = "slurm.json", "slurm.look"
LOOK_S = 60.0
# The time of a change beside the wait for its lock.
_MARGIN_S = 3.0


class StoreSilent(StoreUnusable):
    """The filesystem of the shared directory does not answer this node."""


def directory(settings: Breaker) -> Path:
    """Return the shared directory.

    Raises:
        StoreUnusable: it is not set, or others than root and this user can write there.
    """
    if not settings.directory:
        raise StoreUnusable("breaker.directory is not set")
    path = Path(settings.directory)
    try:
        status = path.lstat()
    except OSError as err:
        raise StoreUnusable(f"{path}: {err.strerror}") from err
    if not stat.S_ISDIR(status.st_mode):
        raise StoreUnusable(f"{path} is not a directory")
    if others_can_write(status):
        raise StoreUnusable(f"{path} can be written by others than root")
    return path


def in_child(
    site: Site, work: Callable[[], A], kind: type[A], *, limit_s: float | None = None
) -> A:
    """Run work on the shared directory in a child; return its answer.

    Args:
        site: the config file.
        work: what the child does.
        kind: the type of the answer, for msgspec.
        limit_s: timeout; None for the one of work that waits for the lock.

    Raises:
        StoreSilent: it did not answer in time.
        StoreUnusable: it could not be done, and why.
    """
    limit_s = site.timing.lock_s + _MARGIN_S if limit_s is None else limit_s
    match run_guarded(site.state, _STUCK, lambda: msgspec.msgpack.encode(work()), limit_s):
        case Answered(data=data):
            return from_msgpack(data, kind)
        case Broke(reason=reason):
            raise StoreUnusable(reason)
        case Hung(limit_s=limit_s):
            where = site.breaker.directory
            raise StoreSilent(f"{where} did not answer within {limit_s:g} s")
        case Stuck(pid=pid):
            where = site.breaker.directory
            raise StoreSilent(f"{where}: process {pid} of an earlier run waits in the kernel")


def _ledger(settings: Breaker) -> SharedStore[DrainLedger]:
    return SharedStore(directory(settings), _LEDGER, DrainLedger)


def read_ledger(settings: Breaker) -> DrainLedger:
    """Return the ledger, an empty one if there is none.

    Raises:
        StoreUnusable: it is there and cannot be read.
    """
    with _hinting_at_reset():
        return _ledger(settings).load() or DrainLedger()


@contextlib.contextmanager
def _hinting_at_reset() -> Iterator[None]:
    try:
        yield
    except StoreDamaged as err:
        raise StoreDamaged(f"{err}; begin a new one: slurm-health nodes reset") from err


def change_ledger(
    site: Site, change: Callable[[DrainLedger], tuple[DrainLedger, A]], kind: type[A]
) -> A:
    """Change the ledger; return the answer of `change`, a value of this kind for msgspec.

    Raises:
        StoreUnusable: it could not be done, and why. The ledger may or may not have the change.
    """

    def work() -> A:
        with _hinting_at_reset():
            return _ledger(site.breaker).update(
                lambda ledger: change(ledger or DrainLedger()),
                lock_limit_s=site.timing.lock_s,
            )

    return in_child(site, work, kind)


def clear_ledger(site: Site) -> None:
    """Begin a new ledger, even if the old one is damaged.

    Raises:
        StoreUnusable: it could not be done, and why.
    """

    def work() -> None:
        _ledger(site.breaker).update(
            lambda _: (DrainLedger(), None), lock_limit_s=site.timing.lock_s, anew=True
        )

    in_child(site, work, type(None))


class NodeFiles(Generic[A]):
    """A value of every node, as the files `NAME/NODE.json` of the shared directory.

    A node replaces its own alone, so that no lock is needed. Hooks call it in a child.

    Args:
        name: of the directory.
        kind: the value's type, for msgspec.
        private: only root may look into it.
    """

    def __init__(self, name: str, kind: type[A], *, private: bool = False) -> None:
        self._name = name
        self._kind = kind
        self._modes = (0o700, 0o600) if private else (0o755, 0o644)

    def save(self, settings: Breaker, node: str, value: A) -> None:
        """Replace the value of a node.

        Raises:
            StoreUnusable: the shared directory cannot be used.
            OSError: the file cannot be written.
        """
        place = directory(settings) / self._name
        place.mkdir(mode=self._modes[0], exist_ok=True)
        publish(place / f"{node}.json", msgspec.json.encode(value), mode=self._modes[1])

    def load(self, settings: Breaker) -> dict[str, A]:
        """Return the values by node, without those that cannot be read."""
        values = {}
        for path in self._paths(settings):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                values[path.stem] = from_json(path.read_bytes(), self._kind)
        return values

    def delete(self, settings: Breaker, node: str) -> None:
        """Delete the value of a node, if there is one.

        Raises:
            StoreUnusable: it cannot be deleted.
        """
        path = directory(settings) / self._name / f"{node}.json"
        try:
            path.unlink(missing_ok=True)
        except PermissionError as err:
            raise StoreForRoot(f"only root can remove what is in {path.parent}") from err
        except OSError as err:
            raise StoreUnusable(f"{path} cannot be removed: {err.strerror}") from err

    def delete_others(self, settings: Breaker, nodes: Collection[str]) -> None:
        """Delete the values of all nodes but these, if this user may."""
        with contextlib.suppress(OSError):
            for path in self._paths(settings):
                if path.stem not in nodes:
                    path.unlink()

    def _paths(self, settings: Breaker) -> Iterator[Path]:
        return Path(settings.directory or "/nowhere", self._name).glob("*.json")


def claim_look(place: Path, node: str, now_s: float) -> tuple[bool, bytes]:
    """Return whether this node is to look at all nodes now, and the list if it names this node.

    One node a minute looks. A claim that is older was left by one that died.
    """
    path, claim = place / SLURM_LIST, place / _LOOK
    data = b""
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        if now_s - path.stat().st_mtime < LOOK_S:
            return False, data if f'"node":"{node}"'.encode() in data else b""
    try:
        claim.mkdir(mode=0o755)
        wanted = True
    except FileExistsError:
        wanted = now_s - claim.stat().st_mtime > LOOK_S
        if wanted:
            os.utime(claim)
    return wanted, data if f'"node":"{node}"'.encode() in data else b""


def end_look(site: Site) -> None:
    """Give back the claim."""
    with contextlib.suppress(OSError, StoreUnusable):
        (directory(site.breaker) / _LOOK).rmdir()


def user_name(uid: int) -> str:
    """Return a user's name, the number if this machine knows none.

    If names come from a server this may take long: hooks call it in a child.
    """
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)
