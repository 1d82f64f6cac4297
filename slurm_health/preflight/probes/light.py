# SPDX-License-Identifier: Apache-2.0
"""A device and a group without torch: processors with numpy, and TCP. Neither GPUs nor NCCL.

numpy's library uses the vector units. It multiplies in as many threads as the worker has, each with
a product of its own: the threads of such a library wait for each other at each product, and burn
what time they share with others.

A group is two nodes with one connection. Whatever waits looks every few milliseconds whether it is
to stop, so no worker is ever stuck in an exchange.

The first member listens on the address that the orders name. Anybody may reach it: it keeps few
connections, reads few bytes of each, and takes part only with who knows the name of the meeting,
which has a secret in it. No address is believed, and nothing that is read is ever executed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.update(
    # The libraries that numpy may multiply with read these when they are loaded.
    dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1"
    )
)
import numpy as np

from slurm_health.preflight.probes import host
from slurm_health.preflight.probes.context import Figure
from slurm_health.preflight.probes.meeting import POLL_S, Check, connected
from slurm_health.preflight.probes.timing import Stopwatch

BACKEND = "tcp"
_LARGEST, _TILE = 8, 16
_WORD_BYTES = 8
_FACTOR = 0x1E3779B97F4A7C15  # odd: the products of all numbers below 2^64 differ
_LOOK_MS = 20  # how often an exchange looks whether it is to stop
_HELLO_BYTES = 512  # all that anybody says before it is known who that is
_WELCOME = b"+"
_STRANGERS = 64  # connections of which it is not known yet whose they are
_NUMBER = 8


class LightDevice:
    """As `context.Device` says: this node's processors; `threads` are those of a worker."""

    on_cuda = False
    torch = ""
    raw = "cpu"
    name = "the processors"
    backend = BACKEND

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def facts(self) -> dict[str, Any]:
        """Return what the event `ready` says of a worker with it.

        Nodes with another numpy are not compared with it: the model tells them apart.
        """
        return {
            "torch": "",
            "backend": BACKEND,
            "device": "cpu",
            "model": f"{host.model(self._threads)}, numpy {np.__version__}",
            "free_bytes": self.free_bytes(),
            "collective_library": "",
        }

    def product(self, size: int, *, exact: bool) -> _Product:  # noqa: ARG002 - exact ones cost nothing more
        """Make two matrices of integers, whose product is known."""
        return _Product(size, self._threads, self._pool)

    def memory(self) -> Iterator[str]:
        """Yield each NUMA node, while this thread runs there: its name, where there are several."""
        nodes = host.numa_nodes()
        for number, processors in nodes.items():
            with host.only_on(processors):
                yield f"NUMA {number}" if len(nodes) > 1 else ""

    def words(self, size_bytes: int) -> Any:
        """Return an array of 64-bit integers that holds nothing yet."""
        return np.empty(size_bytes // _WORD_BYTES, dtype=np.int64)

    def fill(self, words: Any, value: int) -> Any:
        """Write one integer to each word; return the array."""
        words.fill(value)
        return words

    def number(self, words: Any, first: int, step: int) -> Any:
        """Write `first` to the first word, and to each one `step` more; return the array."""
        words[:] = np.arange(first, first + len(words) * step, step)
        return words

    def payload(self, size_bytes: int, rank: int) -> Any:
        """Return what a rank sends: no two words are alike, and every rank knows that of others."""
        return np.arange(1, size_bytes // _WORD_BYTES + 1) * _FACTOR + rank

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array."""
        np.copyto(target, source)

    def difference(self, words: Any, expected: Any) -> tuple[int, int, int]:
        """Return how many words differ from others, or a value; the first one's place, and it."""
        wrong = words != expected
        place = int(wrong.argmax())
        return int(wrong.sum()), place, int(words[place]) % (1 << 64)

    def watch(self) -> Stopwatch:
        """Return what times this device."""
        return Stopwatch()

    def synchronize(self) -> None:
        """Wait for nothing: all is done when a call returns."""

    def free_bytes(self) -> int:
        """Return how much of its memory is free; 0 where that is not known."""
        return host.memory_bytes()[0]

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""
        return isinstance(err, MemoryError)

    def users(self) -> str:
        """Return nothing: processors are everybody's."""
        return ""


class _Product:
    """As `context.Product` says: integers, of which every partial sum is exact.

    Both matrices are made of one small block again and again, so that the right product is that of
    the block, which is computed once, in integers.
    """

    def __init__(self, size: int, threads: int, pool: ThreadPoolExecutor) -> None:
        self._tiles = size // _TILE
        hashed = (np.arange(2 * _TILE**2) * _FACTOR >> 40) % (2 * _LARGEST + 1) - _LARGEST
        left, right = hashed.reshape(2, _TILE, _TILE)
        self._expected = (left @ right * self._tiles).astype("f4")[None, :, None, :]
        self._left, self._right = (
            np.tile(block, (self._tiles, self._tiles)).astype("f4") for block in (left, right)
        )
        self._out = [np.zeros((size, size), dtype="f4") for _ in range(threads)]
        self._pool = pool

    def multiply(self, times: int = 1) -> None:
        """Multiply so often in each thread; they wait for each other at the end alone."""

        def work(out: Any) -> None:
            for _ in range(times):
                np.matmul(self._left, self._right, out=out)

        list(self._pool.map(work, self._out))

    def wrong(self) -> int:
        """Return how many values of the last results are not exact."""
        shape = self._tiles, _TILE, self._tiles, _TILE
        return sum(int((out.reshape(shape) != self._expected).sum()) for out in self._out)

    def values(self) -> int:
        """Return how many values one multiplication calculates."""
        return sum(out.size for out in self._out)


def listen(address: str) -> socket.socket:
    """Return the socket at which members meet whose group this worker's node leads.

    Raises:
        SystemExit: this node cannot listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as err:
        raise SystemExit(f"light probes cannot listen on {address}: {err.strerror}") from err


class LightGroup:
    """As `context.Group` says; of two nodes, each with one light worker: it has no rails.

    Args:
        server: where the other one meets this worker, if it is the first of its group.
        check: raises once the agent has said to stop.
    """

    def __init__(self, server: socket.socket, check: Check) -> None:
        self.connecting: list[int] = []
        self.handle = self
        self._rank = 0
        self._server = server
        self._check = check
        self._peer: socket.socket | None = None

    def join(self, place: Mapping[str, Any], scope: str) -> None:  # noqa: ARG002 - all have one
        """Come together with the other member, and exchange something.

        Raises:
            Unreachable: the place where they meet does not answer.
            ConnectionError: the other one is gone.
            RuntimeError: what it says is wrong.
        """
        self._rank = int(place["rank"])
        name = str(place["prefix"]).encode().ljust(_HELLO_BYTES)
        if self._rank == 0:
            self._peer = self._accept(name)
        else:
            self._peer = self._connect(str(place["address"]), int(place["port"]), name)
        self._peer.setblocking(False)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ranks = self.numbers(self._rank)
        if ranks != [0, 1]:
            raise RuntimeError(f"the group's first exchange failed: it brought {ranks}")

    def _connect(self, address: str, port: int, name: bytes) -> socket.socket:
        """Connect to the first member, which closes while it has not come to this meeting."""
        while True:
            peer = connected(address, port, self._check, source=self._server.getsockname()[0])
            peer.sendall(name)
            poll = select.poll()
            poll.register(peer, select.POLLIN)
            try:
                while not poll.poll(_LOOK_MS):
                    self._check()
                if _received(peer, len(_WELCOME)) == _WELCOME:
                    return peer
            except BaseException:
                peer.close()
                raise
            peer.close()
            time.sleep(POLL_S)

    def _accept(self, name: bytes) -> socket.socket:
        """Return the connection of the member that names this meeting.

        Others that come are none of the group. One of these that says nothing holds up nobody, and
        goes when there are too many of them.
        """
        strangers: dict[socket.socket, bytes] = {}
        self._server.setblocking(False)
        try:
            while True:
                poll = select.poll()
                for item in (self._server, *strangers):
                    poll.register(item, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll(_LOOK_MS)}
                self._check()
                for stranger in [one for one in strangers if one.fileno() in ready]:
                    hello = strangers.pop(stranger)
                    part = _received(stranger, _HELLO_BYTES - len(hello))
                    hello += part
                    if part and len(hello) < _HELLO_BYTES:
                        strangers[stranger] = hello
                    elif hello == name:
                        stranger.sendall(_WELCOME)
                        return stranger
                    else:
                        stranger.close()
                if self._server.fileno() in ready:
                    with contextlib.suppress(OSError):  # it is gone again
                        stranger, _ = self._server.accept()
                        stranger.setblocking(False)
                        strangers[stranger] = b""
                    if len(strangers) > _STRANGERS:
                        oldest = next(iter(strangers))
                        del strangers[oldest]
                        oldest.close()
        finally:
            for stranger in strangers:
                stranger.close()

    def join_rail(self) -> None:
        """Go on: there is one worker on each node."""

    def join_all(self) -> None:
        """Go on."""

    def meet(self) -> None:
        """Return once the other member has called this as often."""
        self._check()
        if self._peer is not None:
            self.numbers(0)

    def all_gather(self, whole: Any, mine: Any) -> None:
        """Fill the part of the other rank, in an array of both.

        Raises:
            ConnectionError: the other member is gone.
        """
        other = 1 - self._rank
        theirs = whole[other * len(mine) : (other + 1) * len(mine)]
        self._exchange(mine.data.cast("B"), theirs.data.cast("B"))

    def numbers(self, mine: int) -> list[int]:
        """Return the number that each rank gives."""
        theirs = bytearray(_NUMBER)
        self._exchange(memoryview(mine.to_bytes(_NUMBER, "big")), memoryview(theirs))
        both = [mine, int.from_bytes(theirs, "big")]
        return both if self._rank == 0 else both[::-1]

    def most(self, value: float) -> float:
        """Return the larger value of both, the same on both of them."""
        return max(self.numbers(round(value * 1e6))) / 1e6

    def figures(self) -> dict[str, Figure]:
        """Return the interface over which data goes."""
        return {"transport": os.environ.get("GLOO_SOCKET_IFNAME", "")}

    def leave(self) -> None:
        """Leave it, if there is one."""
        if self._peer is not None:
            self._peer.close()
        self._peer = None

    def leave_broken(self) -> bool:
        """Leave it whatever the other does; this worker stays good."""
        self.leave()
        return True

    def interrupt(self) -> None:
        """Nothing waits here that does not hear of an abort by itself."""

    def _exchange(self, out: memoryview, into: memoryview) -> None:
        """Send all of one while receiving all of the other."""
        peer = self._peer
        assert peer is not None
        poll = select.poll()
        while out or into:
            poll.register(peer, (select.POLLOUT if out else 0) | (select.POLLIN if into else 0))
            ready = poll.poll(_LOOK_MS)
            self._check()
            for _, events in ready:
                if out and events & ~select.POLLIN:
                    with contextlib.suppress(BlockingIOError):
                        out = out[peer.send(out) :]
                if into and events & ~select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        count = peer.recv_into(into)
                        if not count:
                            raise ConnectionError(f"rank {1 - self._rank} closed its connection")
                        into = into[count:]


def _received(connection: socket.socket, most_bytes: int) -> bytes:
    """Return what has arrived, nothing where the other side is gone."""
    try:
        return connection.recv(most_bytes)
    except OSError:
        return b""
