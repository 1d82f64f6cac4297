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

from slurm_health.node.rules import accusations, breaker
from slurm_health.node.rules.accusations import NodeMark
from slurm_health.node.rules.settings import Breaker
from slurm_health.node.site_settings import Site
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.system.killable import Answered, Broke, Hung, Stuck, run_guarded
from slurm_health.system.private_files import publish
from slurm_health.system.site_file import others_can_write

LEDGER = "ledger.json"
_MARKS = "marks"
# Ledger and marks say whose jobs accuse which node.
ROOT_ONLY = 0o600
# What a child that asks for the shared directory is called. No check has a name with a space.
STUCK = "shared directory"
# What a change takes beside the wait for its lock.
MARGIN_S = 3.0
_NODE = re.compile(r"[\w-][\w.-]*", re.ASCII)
_LEDGER_BYTES = 16 << 20


class SharedStateUnusable(Exception):
    """What is kept cannot be used: not root's alone, silent, locked for too long, or garbled."""


class LedgerDamaged(SharedStateUnusable):
    """The ledger is there and cannot be understood."""


class ForRootOnly(SharedStateUnusable):
    """It tells who accuses which node, and is shown to root alone."""


class DrainReserved(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a drain may happen: not, where `why_not` says so. It is the `today`th of a day.

    `tripped`: with it, a breaker has tripped.
    """

    why_not: str = ""
    today: int = 0
    tripped: bool = False


def known_refusal(site: Site, wanted: breaker.DrainEntry) -> str:
    """Say why the ledger rules a drain out as it is; empty when Slurm has to be asked.

    Without the lock, and in a child: when a whole cluster fails, this is all that most nodes do.
    """

    def look() -> bytes:
        ledger = read_ledger(site.breaker)
        return breaker.refusal(ledger, wanted, site.breaker, name_of=user_name).encode()

    try:
        return in_child(site, look).decode()
    except SharedStateUnusable as err:
        return _unusable(err)


def reserve_drain(
    site: Site,
    wanted: breaker.DrainEntry,
    *,
    members: dict[str, list[str]],
    ours: list[str],
    racks: dict[str, tuple[str, ...]],
) -> DrainReserved:
    """Count a drain before it happens, if it may."""

    def decide(ledger: breaker.DrainLedger) -> tuple[breaker.DrainLedger, bytes]:
        match breaker.reserve(
            ledger,
            wanted,
            limits=site.breaker,
            members=members,
            ours=ours,
            racks=racks,
            name_of=user_name,
        ):
            case breaker.DrainAllowed(ledger=after, today=today):
                return after, msgspec.json.encode(DrainReserved(today=today))
            case breaker.DrainRefused(why=why, ledger=after):
                tripped = after.trips.keys() != ledger.trips.keys()
                return after, msgspec.json.encode(DrainReserved(why_not=why, tripped=tripped))

    try:
        return from_json(change_ledger(site, decide), DrainReserved)
    except SharedStateUnusable as err:
        return DrainReserved(why_not=_unusable(err))


def user_name(uid: int) -> str:
    """Return a user's name, the number where this machine knows none.

    Where names come from a server this may take long: hooks ask in a child.
    """
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _unusable(err: SharedStateUnusable) -> str:
    return f"could not use the breaker's ledger: {err}"


def cancel_drain(site: Site, node: str, time_s: float) -> None:
    """Take back a drain that did not happen. Where that fails, it goes on counting."""
    with contextlib.suppress(SharedStateUnusable):
        change_ledger(site, lambda ledger: (breaker.take_back(ledger, node, time_s), b""))


def count_return(site: Site, node: str) -> None:
    """Note that a person has returned a node; where that fails, its drain goes on counting."""
    if site.breaker.directory:
        with contextlib.suppress(SharedStateUnusable):
            change_ledger(site, lambda ledger: (breaker.with_return(ledger, node), b""))


def change_ledger(
    site: Site, decide: Callable[[breaker.DrainLedger], tuple[breaker.DrainLedger, bytes]]
) -> bytes:
    """Change the ledger under the lock; return what `decide` answered.

    Raises:
        SharedStateUnusable: it could not be done, and why. The ledger may or may not count the
            change.
    """

    def work(shared: Path) -> bytes:
        before = _read_ledger(shared)
        after, answer = decide(before)
        if after != before:
            publish(shared / LEDGER, msgspec.json.encode(after), mode=ROOT_ONLY)
        return answer

    return under_lock(site, work)


def clear_ledger(site: Site) -> None:
    """Begin a new ledger, whatever the old one has come to.

    Raises:
        SharedStateUnusable: it could not be done, and why.
    """

    def work(shared: Path) -> bytes:
        publish(shared / LEDGER, msgspec.json.encode(breaker.DrainLedger()), mode=ROOT_ONLY)
        return b""

    under_lock(site, work)


def read_ledger(settings: Breaker) -> breaker.DrainLedger:
    """Return the ledger, an empty one where there is no file.

    Raises:
        SharedStateUnusable: it is there and cannot be read.
    """
    return _read_ledger(shared_directory(settings))


def _read_ledger(shared: Path) -> breaker.DrainLedger:
    path = shared / LEDGER
    try:
        return from_json(path.read_bytes()[:_LEDGER_BYTES], breaker.DrainLedger)
    except FileNotFoundError:
        return breaker.DrainLedger()
    except msgspec.DecodeError as err:
        raise LedgerDamaged(
            f"{path} is damaged: {err}; mend it with: slurm-health nodes reset"
        ) from err
    except PermissionError as err:
        raise ForRootOnly(f"{path} can be read by root only") from err
    except OSError as err:
        raise SharedStateUnusable(f"{path} cannot be read: {err.strerror}") from err


def add_mark(site: Site, node: str, mark: NodeMark) -> tuple[NodeMark, ...]:
    """Add a mark to a node's and return all that are alive.

    Raises:
        SharedStateUnusable: they cannot be kept; the mark is lost.
    """

    def work(shared: Path) -> bytes:
        path = _marks_of(shared, node)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        after = accusations.add(_read_marks(path), mark, site.marks)
        publish(path, msgspec.json.encode(after), mode=ROOT_ONLY)
        return msgspec.msgpack.encode(after)

    return from_msgpack(under_lock(site, work), tuple[NodeMark, ...])


def marks_of(settings: Breaker, node: str) -> tuple[NodeMark, ...]:
    """Return a node's marks, the old ones too.

    Raises:
        SharedStateUnusable: they cannot be read.
    """
    return _read_marks(_marks_of(shared_directory(settings), node))


def marked_nodes(settings: Breaker) -> list[str]:
    """Return the nodes that have a file of marks.

    Raises:
        SharedStateUnusable: the shared directory cannot be used.
    """
    directory = shared_directory(settings) / _MARKS
    try:
        return sorted(each.stem for each in directory.iterdir() if each.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as err:
        raise _refused(directory, err) from err


def forget_marks(settings: Breaker, node: str) -> None:
    """Remove a node's marks.

    Raises:
        SharedStateUnusable: the shared directory cannot be used.
    """
    path = _marks_of(shared_directory(settings), node)
    try:
        path.unlink(missing_ok=True)
    except OSError as err:
        raise _refused(path, err) from err


def why_marks_stay(settings: Breaker, node: str) -> str:
    """Return why a node's marks could not be removed by whoever asks; empty for no reason.

    Raises:
        SharedStateUnusable: the shared directory cannot be used.
    """
    directory = _marks_of(shared_directory(settings), node).parent
    if not directory.exists() or os.access(directory, os.W_OK | os.X_OK):
        return ""
    return f"only root can read and remove what is in {directory}"


def _refused(path: Path, err: OSError) -> SharedStateUnusable:
    if isinstance(err, PermissionError):
        return ForRootOnly(f"{path}: only root can read and remove what is there")
    return SharedStateUnusable(f"{path}: {err.strerror}")


def _marks_of(shared: Path, node: str) -> Path:
    if not _NODE.fullmatch(node):
        raise SharedStateUnusable(f"{node!r} is not the name of a node")
    return shared / _MARKS / f"{node}.json"


def _read_marks(path: Path) -> tuple[NodeMark, ...]:
    try:
        return from_json(path.read_bytes(), tuple[NodeMark, ...])
    except FileNotFoundError:
        return ()
    except PermissionError as err:
        raise _refused(path, err) from err
    except (OSError, msgspec.DecodeError) as err:
        raise SharedStateUnusable(f"{path} cannot be read: {err}") from err


def shared_directory(settings: Breaker) -> Path:
    """Return the shared directory.

    Raises:
        SharedStateUnusable: there is none, or others than its owner, root or whoever asks, can
            write there.
    """
    if not settings.directory:
        raise SharedStateUnusable("breaker.directory is not set")
    path = Path(settings.directory)
    try:
        found = path.lstat()
    except OSError as err:
        raise SharedStateUnusable(f"{path}: {err.strerror}") from err
    if not stat.S_ISDIR(found.st_mode):
        raise SharedStateUnusable(f"{path} is not a directory")
    if others_can_write(found):
        raise SharedStateUnusable(f"{path} can be written by others than root")
    return path


def under_lock(site: Site, work: Callable[[Path], bytes]) -> bytes:
    """Work on the shared directory with its lock held, in a child; return its answer.

    Raises:
        SharedStateUnusable: it could not be done, and why.
    """

    def locked() -> bytes:
        shared = shared_directory(site.breaker)
        with held(shared / "lock", site.breaker.lock_limit_s):
            return work(shared)

    return in_child(site, locked)


def in_child(site: Site, work: Callable[[], bytes]) -> bytes:
    """Do what touches the shared directory, in a child; return its answer.

    Raises:
        SharedStateUnusable: it could not be done, and why.
    """
    directory = site.breaker.directory
    match run_guarded(site.state, STUCK, work, site.breaker.lock_limit_s + MARGIN_S):
        case Answered(data=data):
            return data
        case Broke(reason=reason):
            raise SharedStateUnusable(reason)
        case Hung(limit_s=limit_s):
            raise SharedStateUnusable(f"{directory} did not answer within {limit_s:g} s")
        case Stuck(pid=pid):
            raise SharedStateUnusable(
                f"{directory}: process {pid} of an earlier run waits in the kernel"
            )


@contextlib.contextmanager
def held(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock.

    Raises:
        SharedStateUnusable: another holds it for too long.
        OSError: it cannot be made.
    """
    # Loaded here: a node that is well never needs it.
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=limit_s, mode=0o600)
    try:
        lock.acquire()
    except Timeout as err:
        raise SharedStateUnusable(f"{path} is held by another for more than {limit_s:g} s") from err
    try:
        yield
    finally:
        lock.release()
