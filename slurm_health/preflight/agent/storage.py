# SPDX-License-Identifier: Apache-2.0
"""The test of storage on one node: in a child of the agent, beside the rounds of the workers.

Each path has a thread for the node's own files, and one for those of each peer. A thread that the
kernel holds keeps no other from ending, and the child answers in time without it. Such a child then
waits in the kernel until the server answers or its client ends, whoever kills it.

    PATH/.slurm-health-SECRET/       of one check: made by the first node, removed by the last
        n1                           small, written and synced first
        n1.new -> n1.large           large, renamed once it is synced: then all of it is there

Nodes begin one after another, and many nodes write less each: a thousand of them are no herd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from slurm_health.preflight.session.storage import (
    ABSENT,
    FULL,
    HUNG,
    LATE,
    LIMIT_S,
    OK,
    REFUSED,
    STAGGER_S,
    STORAGE_NODES,
    STORAGE_PATHS,
    UNSEEN,
)
from slurm_health.records.decoding import from_json
from slurm_health.records.nodeset import expand
from slurm_health.records.records import RoundStarted, StorageRead, StorageTested
from slurm_health.system import proc
from slurm_health.system.killable import Answered, Child

_SMALL_BYTES, _LARGE_BYTES, _PIECE_BYTES = 4096, 8_000_000, 1_000_000
# All nodes together write no more than this to a path.
_TOGETHER_BYTES = 512_000_000
_END_EARLY_S = 0.3  # a thread that waits for a peer gives up before the child answers
_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5
_REMOVE_S = 2.0
# A filesystem without locks is not at fault for that.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})


class StorageTest:
    """The test on this node, from the start of its round on until `end`."""

    def __init__(self, node: str, started: RoundStarted, secret: str) -> None:
        nodes = expand(str(started.options[STORAGE_NODES]))
        place, total = nodes.index(node), len(nodes)
        name = hashlib.sha256(f"{secret}/storage".encode()).hexdigest()[:16]
        following, before = nodes[(place + 1) % total], nodes[place - 1]
        self._paths = [
            _Path(
                path,
                f"{path}/.slurm-health-{name}",
                node,
                # The large file has one reader, who removes it.
                {peer: peer == following for peer in (following, before) if peer != node},
                min(_LARGE_BYTES, _TOGETHER_BYTES // total),
            )
            for path in str(started.options[STORAGE_PATHS]).split("\n")
        ]
        delay_s = place * STAGGER_S
        self._child: Child | None = Child(
            lambda: _test(self._paths, delay_s), delay_s + LIMIT_S + 1.0, 1 << 20
        )

    @property
    def descriptor(self) -> int | None:
        """What becomes readable when it has measured, None afterwards."""
        return self._child.pipe if self._child is not None else None

    def poll(self) -> list[StorageTested]:
        """Return what it has measured, once it has; never wait."""
        if self._child is None or self._child.read():
            return []
        result = self._child.result()
        self._close()
        if not isinstance(result, Answered):
            return []  # nothing is known, as of a node without an agent
        return from_json(result.data, list[StorageTested])

    def end(self) -> Child:
        """Begin to remove the node's files; return the child that does."""
        self._close()
        return Child(lambda: _remove(self._paths), _REMOVE_S, 1 << 10)

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            os.close(child.pipe)


def _test(paths: Iterable[_Path], delay_s: float) -> bytes:
    """Test all paths at once, in the child."""
    time.sleep(delay_s)
    threads = [thread for path in paths for thread in path.started()]
    _join(threads, LIMIT_S)
    return msgspec.json.encode([path.result() for path in paths])


def _remove(paths: Iterable[_Path]) -> bytes:
    _join([_begun(path.remove) for path in paths], _REMOVE_S)
    return b""


def _begun(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def _join(threads: Iterable[threading.Thread], limit_s: float) -> None:
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))


class _Path:
    """The test of one path; `peers` says of whose files the large one is to be read too."""

    def __init__(
        self, path: str, directory: str, node: str, peers: dict[str, bool], large_bytes: int
    ) -> None:
        self._path, self._directory, self._own = path, directory, f"{directory}/{node}"
        self._node, self._peers, self._large_bytes = node, peers, large_bytes
        self._status, self._at = HUNG, "stat"
        self._small_ms = self._large_ms = 0.0
        self._reads: dict[str, StorageRead] = {}
        self._mount = proc.Mount("", "")
        self._free_bytes = self._total_bytes = 0
        self._looked_at = threading.Event()
        self._until_s = 0.0

    def started(self) -> list[threading.Thread]:
        """Start the threads."""
        self._until_s = time.monotonic() + LIMIT_S - _END_EARLY_S
        self._mount = proc.mount_of(proc.mounted(), self._path)
        return [_begun(self._write), *(_begun(self._read, peer) for peer in self._peers)]

    def result(self) -> StorageTested:
        """Return what is known by now."""
        return StorageTested(
            node=self._node,
            path=self._path,
            status=self._status,
            at="" if self._status == OK else self._at,
            small_ms=round(self._small_ms, 2),
            large_ms=round(self._large_ms, 2),
            large_bytes=self._large_bytes if self._large_ms else 0,
            reads=dict(self._reads),
            filesystem=self._mount.kind,
            server=self._mount.source if self._mount.has_server else "",
            free_bytes=self._free_bytes,
            total_bytes=self._total_bytes,
        )

    def _write(self) -> None:
        try:
            self._look()
            self._write_small()
            if self._mount.has_server:
                self._write_large()
            self._status = OK
        except OSError as err:
            self._status = errno.errorcode.get(err.errno or errno.EIO, "EIO")
        finally:
            self._looked_at.set()

    def _look(self) -> None:
        status = os.statvfs(self._path)  # an automounter mounts it now
        self._free_bytes = status.f_bavail * status.f_frsize
        self._total_bytes = status.f_blocks * status.f_frsize
        self._mount = proc.mount_of(proc.mounted(), os.path.realpath(self._path))
        self._looked_at.set()

    def _write_small(self) -> None:
        begun_s = time.perf_counter()
        self._at = "create"
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)  # noqa: PTH102 - the agent loads little
        self._fill(self._own, _content(self._node), 1)
        self._at = "lock"
        self._again(lock=True)
        self._small_ms = (time.perf_counter() - begun_s) * 1e3

    def _write_large(self) -> None:
        begun_s = time.perf_counter()
        pieces = max(1, self._large_bytes // _PIECE_BYTES)
        self._fill(f"{self._own}.new", os.urandom(self._large_bytes // pieces), pieces)
        self._at = "rename"
        os.rename(f"{self._own}.new", f"{self._own}.large")  # noqa: PTH104 - as above
        self._large_ms = (time.perf_counter() - begun_s) * 1e3

    def _fill(self, path: str, data: bytes, times: int) -> None:
        """Make a file of so many pieces, and sync it."""
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            self._at = "write"
            for _ in range(times):
                rest = data
                while rest:
                    rest = rest[os.write(file, rest) :]
            self._at = "sync"
            os.fsync(file)
        finally:
            os.close(file)

    def _again(self, *, lock: bool = False) -> None:
        """Make and remove a file: then no cache of this node takes the directory for unchanged."""
        path = f"{self._own}.again-{threading.get_ident()}"
        file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            if lock:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(file, fcntl.LOCK_UN)
        except OSError as err:
            if err.errno not in _NO_LOCKS:
                raise
        finally:
            os.close(file)
            os.unlink(path)  # noqa: PTH108 - as above

    def _read(self, peer: str) -> None:
        self._looked_at.wait(_LOOK_S)
        if self._looked_at.is_set() and not self._mount.has_server:
            return  # nobody else writes there
        self._reads[peer] = StorageRead(status=HUNG)
        try:
            self._reads[peer] = self._read_files(f"{self._directory}/{peer}", _content(peer), peer)
        except OSError as err:
            self._reads[peer] = StorageRead(
                status=errno.errorcode.get(err.errno or errno.EIO, "EIO")
            )

    def _read_files(self, path: str, expected: bytes, peer: str) -> StorageRead:
        if not self._appears(path, expected):
            # What this user may not write here, he may not have written elsewhere either.
            return StorageRead(status=LATE if self._status in REFUSED | FULL else UNSEEN)
        if not self._peers[peer]:
            return StorageRead(status=OK)
        if not self._appears(f"{path}.large"):
            return StorageRead(status=LATE)
        begun_s = time.perf_counter()
        with open(f"{path}.large", "rb", buffering=0) as file:  # noqa: PTH123 - as above
            while file.read(_PIECE_BYTES):
                pass
        took_ms = (time.perf_counter() - begun_s) * 1e3
        os.unlink(f"{path}.large")  # noqa: PTH108 - as above
        return StorageRead(status=OK, ms=round(took_ms, 2))

    def _appears(self, path: str, expected: bytes = b"") -> bool:
        """Wait until a file of a peer is there, with its content if that is short."""
        wait_s = _FIRST_LOOK_S
        while True:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if os.read(file, len(expected)) == expected:
                        return True
                finally:
                    os.close(file)
            gives_up = self._status in REFUSED | FULL | ABSENT
            if gives_up or time.monotonic() + wait_s > self._until_s:
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOOK_S)
            with contextlib.suppress(OSError):
                self._again()

    def remove(self) -> None:
        """Remove this node's files, and the directory after the last of all nodes."""
        for name in (self._own, f"{self._own}.new", f"{self._own}.large"):
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 - as above
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)  # noqa: PTH106 - as above


def _content(node: str) -> bytes:
    return node.encode().ljust(_SMALL_BYTES)
