# SPDX-License-Identifier: Apache-2.0
"""The test of storage on one node: in a child of the agent, beside the rounds of the workers.

Each path has a thread for the node's own files, and one for those of each peer. A thread that the
kernel holds keeps no other from ending, and the child answers in time without it. Such a child then
waits in the kernel until the server answers or its client ends, whatever signal it gets.

    PATH/.slurm-health-SECRET/       of one check: made by the first node, removed by the last
        n1                           small, written and synced first
        n1.new -> n1.large           large, renamed once it is synced: then all of it is there

Nodes begin one after another, and many nodes write less each: a thousand of them are no herd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import json, structs

from slurm_health.records.decoding import from_json
from slurm_health.records.nodeset import expand
from slurm_health.records.probe_catalog import (
    FULL,
    HUNG,
    LATE,
    OK,
    REFUSED,
    STORAGE_LIMIT_S,
    STORAGE_NODES,
    STORAGE_PATHS,
    STORAGE_STAGGER_S,
    UNSEEN,
)
from slurm_health.records.records import Figure, StorageRead, StorageTested
from slurm_health.system import proc
from slurm_health.system.killable import Answered, Child

_SMALL_BYTES, _LARGE_BYTES, _PIECE_BYTES = 4096, 8_000_000, 1_000_000
# All nodes together write no more than this to a path.
_TOGETHER_BYTES = 512_000_000
_END_EARLY_S = 0.3  # a thread that waits for a peer gives up before the child answers
_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5
_REMOVE_S = 1.0
_MOST_BYTES = 1 << 20  # of an answer
# A filesystem without locks is not at fault for that.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})


class StorageTest:
    """The test on this node, from the start of its round on until `end`."""

    def __init__(self, node: str, options: Mapping[str, Figure], secret: str) -> None:
        nodes = expand(str(options[STORAGE_NODES]))
        place, total = nodes.index(node), len(nodes)
        name = hashlib.sha256(f"{secret}/storage".encode()).hexdigest()[:16]
        following, before = nodes[(place + 1) % total], nodes[place - 1]
        # The large file has one reader, who removes it.
        peers = {peer: peer == following for peer in (following, before) if peer != node}
        self._paths = [
            _Path(path, f"{path}/.slurm-health-{name}", node, peers, _TOGETHER_BYTES // total)
            for path in str(options[STORAGE_PATHS]).split(",")
        ]
        delay_s = place * STORAGE_STAGGER_S
        self._child: Child | None = Child(
            lambda: _test(self._paths, delay_s), delay_s + STORAGE_LIMIT_S + 1.0, _MOST_BYTES
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
        # Nothing is known of a node whose child did not answer, as of one without an agent.
        return from_json(result.data, list[StorageTested]) if isinstance(result, Answered) else []

    def end(self) -> None:
        """End the test, and remove the node's files; leave them if that hangs."""
        self._close()
        removals = [path.remove for path in self._paths]
        self._child = Child(lambda: _run(removals, _REMOVE_S), _REMOVE_S, _MOST_BYTES)
        select.select([self._child.pipe], [], [], _REMOVE_S)
        self._close()

    def _close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            os.close(child.pipe)


def _test(paths: Sequence[_Path], delay_s: float) -> bytes:
    """Test all paths at once, in the child."""
    time.sleep(delay_s)
    _run([path.test for path in paths], STORAGE_LIMIT_S)
    return json.encode([StorageTested(**path.known) for path in paths])


def _run(works: Sequence[Callable[[], None]], limit_s: float) -> bytes:
    """Do works side by side in the child, and wait for them, but no longer than this."""
    until_s = time.monotonic() + limit_s
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return b""


class _Path:
    """The test of one path; `known` are the fields of its record, as far as they are known.

    `peers` says of whose files the large one is to be read too.
    """

    def __init__(
        self, path: str, directory: str, node: str, peers: dict[str, bool], most_bytes: int
    ) -> None:
        self._path, self._directory, self._own = path, directory, f"{directory}/{node}"
        self._node, self._peers = node, peers
        self._large_bytes = min(_LARGE_BYTES, most_bytes)
        self._until_s = 0.0
        reads = dict.fromkeys(peers, StorageRead(status=HUNG))
        tested = StorageTested(node=node, path=path, status=HUNG, at="stat", reads=reads)
        self.known = structs.asdict(tested)

    def test(self) -> None:
        """Test the path; where it is not there for this node, its peers' files are not either."""
        self._until_s = time.monotonic() + STORAGE_LIMIT_S - _END_EARLY_S
        try:
            self._note_mount(self._path)
            status = os.statvfs(self._path)  # an automounter mounts it now
            self._note_mount(os.path.realpath(self._path))
        except OSError as err:
            self.known["status"] = _name(err)
            self.known["reads"] = dict.fromkeys(self._peers, StorageRead(status=_name(err)))
            return
        self.known["free_bytes"] = status.f_bavail * status.f_frsize
        self.known["total_bytes"] = status.f_blocks * status.f_frsize
        if not self.known["server"]:
            self.known["reads"] = {}  # no other node writes there
        readers = [functools.partial(self._read, peer) for peer in self.known["reads"]]
        _run([self._write, *readers], STORAGE_LIMIT_S)

    def _note_mount(self, path: str) -> None:
        mount = proc.mount_of(proc.mounted(), path)
        self.known["filesystem"] = mount.kind
        self.known["server"] = mount.source if mount.has_server else ""

    def _write(self) -> None:
        known = self.known
        try:
            begun_s = time.perf_counter()
            known["at"] = "create"
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._directory, 0o700)  # noqa: PTH102 - the agent loads little
            self._fill(self._own, _content(self._node))
            self._make_and_remove()
            known["small_ms"] = _since_ms(begun_s)
            if known["server"]:
                begun_s = time.perf_counter()
                self._fill(f"{self._own}.new", *_pieces(self._large_bytes))
                os.rename(f"{self._own}.new", f"{self._own}.large")  # noqa: PTH104 - as above
                known |= {"large_ms": _since_ms(begun_s), "large_bytes": self._large_bytes}
            known |= {"status": OK, "at": ""}
        except OSError as err:
            known["status"] = _name(err)

    def _fill(self, path: str, *data: bytes) -> None:
        """Make a file, lock it, write it and sync it."""
        with open(path, "wb") as file:  # noqa: PTH123 - as above
            self.known["at"] = "lock"
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as err:
                if err.errno not in _NO_LOCKS:
                    raise
            self.known["at"] = "write"
            file.writelines(data)
            file.flush()
            self.known["at"] = "sync"
            os.fsync(file.fileno())

    def _make_and_remove(self) -> None:
        """Make and remove a file: then no cache of this node takes the directory for unchanged."""
        path = f"{self._own}.{threading.get_ident()}"
        open(path, "wb").close()  # noqa: PTH123 - as above
        os.unlink(path)  # noqa: PTH108 - as above

    def _read(self, peer: str) -> None:
        try:
            read = self._read_files(f"{self._directory}/{peer}", peer)
        except OSError as err:
            read = StorageRead(status=_name(err))
        self.known["reads"][peer] = read

    def _read_files(self, path: str, peer: str) -> StorageRead:
        if not self._appears(path, _content(peer)):
            # What this user may not write here, they may not have written elsewhere either.
            return StorageRead(status=LATE if self.known["status"] in REFUSED | FULL else UNSEEN)
        if not self._peers[peer]:
            return StorageRead(status=OK)
        if not self._appears(f"{path}.large"):
            return StorageRead(status=LATE)
        begun_s = time.perf_counter()
        with open(f"{path}.large", "rb", buffering=0) as file:  # noqa: PTH123 - as above
            while file.read(_PIECE_BYTES):
                pass
        took_ms = _since_ms(begun_s)
        os.unlink(f"{path}.large")  # noqa: PTH108 - as above
        return StorageRead(status=OK, ms=took_ms)

    def _appears(self, path: str, content: bytes = b"") -> bool:
        """Wait until a file of a peer is there, and begins with this."""
        wait_s = _FIRST_LOOK_S
        while True:
            with (
                contextlib.suppress(FileNotFoundError),
                open(path, "rb", buffering=0) as file,  # noqa: PTH123 - as above
            ):
                if file.read(len(content)) == content:
                    return True
            hopeless = self.known["status"] in REFUSED | FULL
            if hopeless or time.monotonic() + wait_s > self._until_s:
                return False
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOOK_S)
            with contextlib.suppress(OSError):
                self._make_and_remove()

    def remove(self) -> None:
        """Remove this node's files, and the directory after the last of all nodes."""
        for name in (self._own, f"{self._own}.new", f"{self._own}.large"):
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 - as above
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)  # noqa: PTH106 - as above


def _content(node: str) -> bytes:
    return node.encode().ljust(_SMALL_BYTES)


def _pieces(total_bytes: int) -> Iterator[bytes]:
    """Yield data that no filesystem compresses; to make all of it at random takes 20 ms."""
    piece = os.urandom(_PIECE_BYTES)
    for start in range(0, total_bytes, _PIECE_BYTES):
        yield piece[: total_bytes - start]


def _since_ms(begun_s: float) -> float:
    return round((time.perf_counter() - begun_s) * 1e3, 2)


def _name(err: OSError) -> str:
    return errno.errorcode.get(err.errno or errno.EIO, "EIO")
