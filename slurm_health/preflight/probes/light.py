# SPDX-License-Identifier: Apache-2.0
"""A device and a group without torch: processors with numpy, and TCP. Neither GPUs nor NCCL.

numpy's library uses the vector units. It multiplies in as many threads as the worker has, each with
a product of its own: the threads of such a library wait for each other at each product, and burn
what time they share with others.

Each member of a group has a connection with every other one, of the interface that the job's data
would take, and sends what is its own to all of them at once. Whatever waits looks every few
milliseconds whether it is to stop, so no worker is ever stuck in an exchange.

The members meet at the first one, which listens on the address that the orders name. Anybody may
reach it: it keeps few connections, reads few bytes of each, and takes part only with who knows the
name of the meeting. What is read are numbers and addresses, and nothing is ever executed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
_HELLO_BYTES = 512  # all that anybody says of himself before it is known who that is
_MEMBER_BYTES = 64  # the most that is said of a member
_STRANGERS = 64  # connections of which it is not known yet whose they are
_NUMBER = 8
_ROUND_TRIPS = 10
# Of `struct tcp_info` (linux/tcp.h): `tcpi_total_retrans`.
_TCP_INFO_BYTES, _TOTAL_RETRANS = 104, slice(100, 104)


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

    def multiply(self) -> None:
        """Multiply once in each thread."""
        if len(self._out) == 1:
            np.matmul(self._left, self._right, out=self._out[0])
            return
        for _ in self._pool.map(lambda out: np.matmul(self._left, self._right, out=out), self._out):
            pass

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
    try:
        return _listening(address, 1024)
    except OSError as err:
        raise SystemExit(f"light probes cannot listen on {address}: {err.strerror}") from err


class LightGroup:
    """As `context.Group` says; there is one light worker on each node, so it has no rails.

    Args:
        server: where the others meet this worker, if it is the first of its group.
        check: raises once the agent has said to stop.
        environ: names the interface.
    """

    def __init__(
        self, server: socket.socket, check: Check, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.connecting: list[int] = []
        self.handle = self
        self.rank, self.size = 0, 1
        self._server = server
        self._check = check
        self._environ = environ
        self._peers: dict[int, socket.socket] = {}

    def join(self, place: Mapping[str, Any], scope: str) -> None:  # noqa: ARG002 - all have one
        """Come together with all members, connect with all of them, and exchange something.

        Raises:
            Unreachable: the place where they meet, or a member, does not answer.
            ConnectionError: a member is gone.
        """
        self.rank, self.size = int(place["rank"]), int(place["world_size"])
        name, own = str(place["prefix"]), host.address_of(self._environ)
        with _listening(own, self.size) as listening:
            at = f"{own} {listening.getsockname()[1]}"
            if self.rank == 0:
                members = self._assemble(name, at)
            else:
                members = self._report(str(place["address"]), int(place["port"]), name, at)
            for rank in range(self.rank):
                address, port = members[rank]
                peer = connected(address, port, self._check, source=own)
                self._peers[rank] = peer
                peer.sendall(_hello(name, self.rank))
            expected = range(self.rank + 1, self.size)
            self._peers |= {
                rank: peer for rank, (peer, _) in self._accept(listening, name, expected).items()
            }
        for peer in self._peers.values():
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ranks = self.numbers(self.rank)
        if ranks != list(range(self.size)):
            raise RuntimeError(f"the group's first exchange failed: it brought {ranks}")

    def _assemble(self, name: str, own: str) -> list[tuple[str, int]]:
        """Wait until every member has said where it listens, and tell that to all of them."""
        reports = self._accept(self._server, name, range(1, self.size))
        lines = [own, *(" ".join(reports[rank][1]) for rank in sorted(reports))]
        for connection, _ in reports.values():
            connection.sendall(f"{','.join(lines)}\n".encode())
            connection.close()
        return [_member(line) for line in lines]

    def _report(self, address: str, port: int, name: str, own: str) -> list[tuple[str, int]]:
        """Say where this member listens, and return where all of them do.

        The first member closes the connection while it has not come to this meeting.
        """
        while True:
            with connected(address, port, self._check) as connection:
                connection.sendall(_hello(name, self.rank, own))
                line = b""
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                while not line.endswith(b"\n"):
                    self._check()
                    if not poll.poll(_LOOK_MS):
                        continue
                    part = _received(connection, _MEMBER_BYTES * self.size)
                    line += part
                    if not part or len(line) > _MEMBER_BYTES * self.size:
                        break
                else:
                    return [_member(text) for text in line.decode().strip().split(",")]
            time.sleep(POLL_S)

    def _accept(
        self, listening: socket.socket, name: str, expected: Sequence[int]
    ) -> dict[int, tuple[socket.socket, list[str]]]:
        """Return the connections of the expected ranks, and what else each said in its line.

        Others that come are none of the group. One of these that says nothing holds up nobody, and
        goes when there are too many of them.
        """
        members: dict[int, tuple[socket.socket, list[str]]] = {}
        strangers: dict[socket.socket, bytes] = {}
        listening.setblocking(False)
        with contextlib.ExitStack() as stack:
            while len(members) < len(expected):
                poll = select.poll()
                for each in (listening, *strangers):
                    poll.register(each, select.POLLIN)
                ready = {descriptor for descriptor, _ in poll.poll(_LOOK_MS)}
                self._check()
                for stranger in [one for one in strangers if one.fileno() in ready]:
                    line = strangers.pop(stranger)
                    part = _received(stranger, _HELLO_BYTES - len(line))
                    line += part
                    if part and len(line) < _HELLO_BYTES:
                        strangers[stranger] = line
                        continue
                    words = line.decode(errors="replace").split()
                    known = len(words) >= 2 and words[0] == name and words[1].isdecimal()
                    rank = int(words[1]) if known else -1
                    if rank in expected and rank not in members:
                        members[rank] = stranger, words[2:]
                    else:
                        stranger.close()
                if listening.fileno() in ready:
                    with contextlib.suppress(OSError):  # it is gone again
                        stranger, _ = listening.accept()
                        stranger.setblocking(False)
                        stack.callback(stranger.close)
                        strangers[stranger] = b""
                    if len(strangers) > _STRANGERS:
                        oldest = next(iter(strangers))
                        del strangers[oldest]
                        oldest.close()
            stack.pop_all()
        for stranger in strangers:
            stranger.close()
        return members

    def join_rail(self) -> None:
        """Go on: there is one worker on each node."""

    def join_all(self) -> None:
        """Go on."""

    def meet(self) -> None:
        """Return once every member of the group has called this as often."""
        self._check()
        if self._peers:
            self.numbers(0)

    def all_gather(self, whole: Any, mine: Any) -> None:
        """Fill the parts of all other ranks, one after another in an array.

        Raises:
            ConnectionError: a member is gone.
        """
        parts = [part.data.cast("B") for part in np.split(whole, self.size)]
        self._exchange(mine.data.cast("B"), parts)

    def numbers(self, mine: int) -> list[int]:
        """Return the number that each rank gives."""
        parts = [memoryview(bytearray(_NUMBER)) for _ in range(self.size)]
        parts[self.rank][:] = mine.to_bytes(_NUMBER, "big")
        self._exchange(parts[self.rank], parts)
        return [int.from_bytes(part, "big") for part in parts]

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, the same on all of them."""
        return max(self.numbers(round(value * 1e6))) / 1e6

    def figures(self) -> dict[str, Figure]:
        """Return the interface, how long the smallest exchange takes, and what was sent again.

        `latency_us`: until every rank has a number of every other. `retransmitted`: segments that
        were lost on their way, or late.
        """
        took_ms = []
        for _ in range(_ROUND_TRIPS):
            start = time.perf_counter()
            self.numbers(self.rank)
            took_ms.append((time.perf_counter() - start) * 1e3)
        retransmitted = 0
        for peer in self._peers.values():
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            retransmitted += int.from_bytes(info[_TOTAL_RETRANS], sys.byteorder)
        return {
            "latency_us": round(sorted(took_ms)[_ROUND_TRIPS // 2] * 1e3, 1),
            "retransmitted": retransmitted,
            "transport": self._environ.get("GLOO_SOCKET_IFNAME", ""),
        }

    def leave(self) -> None:
        """Leave it, if there is one."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def leave_broken(self) -> bool:
        """Leave it whatever its members do; this worker stays good."""
        self.leave()
        return True

    def interrupt(self) -> None:
        """Nothing waits here that does not hear of an abort by itself."""

    def _exchange(self, mine: memoryview, parts: list[memoryview]) -> None:
        """Send one's own part to all others, while receiving theirs."""
        out = dict.fromkeys(self._peers, mine)
        into = {rank: parts[rank] for rank in self._peers}
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        while out or into:
            poll = select.poll()
            for rank, peer in self._peers.items():
                if wanted := (select.POLLOUT * (rank in out)) | (select.POLLIN * (rank in into)):
                    poll.register(peer, wanted)
            ready = poll.poll(_LOOK_MS)
            self._check()
            for descriptor, events in ready:
                rank = ranks[descriptor]
                peer = self._peers[rank]
                if rank in out and events & ~select.POLLIN:
                    with contextlib.suppress(BlockingIOError):
                        out[rank] = out[rank][peer.send(out[rank]) :]
                if rank in into and events & ~select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        count = peer.recv_into(into[rank])
                        if not count:
                            raise ConnectionError(f"rank {rank} has closed its connection")
                        into[rank] = into[rank][count:]
                for left in (out, into):
                    if rank in left and not left[rank]:
                        del left[rank]


def _listening(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=backlog)


def _hello(name: str, rank: int, listens: str = "") -> bytes:
    """Return what a member says first: so little fits the buffer of a new connection."""
    return f"{name} {rank} {listens}".encode().ljust(_HELLO_BYTES)


def _received(connection: socket.socket, most_bytes: int) -> bytes:
    """Return what has arrived, nothing where the other side is gone."""
    try:
        return connection.recv(most_bytes)
    except BlockingIOError:
        return b""
    except OSError:
        return b""


def _member(line: str) -> tuple[str, int]:
    """Return where a member listens.

    Raises:
        ValueError: this is no address.
    """
    address, port = line.split()
    return str(ipaddress.ip_address(address)), int(port)
