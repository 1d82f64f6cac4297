# SPDX-License-Identifier: Apache-2.0
"""Nodes without a common filesystem: files of a run's directory, mirrored over TCP.

Node 0 has the directory. What is appended there to the files for all nodes appears in a directory
of each other node, and what a node appends to its own file appears in node 0's directory. So a
start runs as on a shared filesystem.

Each side first sends a line that names this protocol, and a fresh nonce. Then every message is a
line: a MAC and the text, which is JSON. The MAC covers the sender, the number of the message, and
the text; its key is made from the secret of the run and both nonces. So a process without the
secret, even one that relays all bytes, can repeat, insert, omit or swap no message.

    node             node 0
    Hello       ->             which it is, and what must be the same on all nodes
                <-  Welcome    or End: the node is refused
    Piece ...  <->  Piece ...  at least every 10 s
    End         ->             the node has all, or is ended; or from node 0: the run is over

Each side has an asyncio loop in a thread of its own. A node that was cut off connects again, and
both sides continue from what the other has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.errors import ChannelError, JournalError, UsageError
from slurm_health.records.nodeset import fold
from slurm_health.records.text import cut, one_line
from slurm_health.torchrun.arguments import NodeZeroAddress

_MAGIC, _NONCE_BYTES = b"slh3", 16
_PIECE_BYTES = 1 << 15
_MOST_BYTES = 1 << 16  # of a line: a piece in base64, or what a stranger sends
_MOST_FILE_BYTES = 256 << 20  # that a node may write in one start
_MOST_VISITORS = 256  # strangers may not take the places of nodes
_MOST_REPORTS, _SHOWN = 20, 200  # nor fill the terminal
_POLL_S, _IDLE_POLL_S = 0.02, 0.5
_IDLE_S = 5.0  # without news a link is idle: the nodes train
_ALIVE_S, _SILENT_S = 10.0, 45.0
_HANDSHAKE_S, _LAST_WORD_S = 10.0, 1.0
_PORT_FREE_S = 15.0  # what was just ended may still hold the port
JOIN_S = 180.0  # node 0 may still be on its way: its machine boots, or its image is loaded
CUT_S = 20.0  # so long an interruption of the network is waited out
_ATTEMPT_S, _PAUSE_S, _REPORT_S = 5.0, 0.25, 5.0
_FOREIGN = "it does not answer like slurm-health"

Say = Callable[[str], None]
_Result = TypeVar("_Result")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node wants to take part.

    `token` is its process's own, to know it when it comes again; then `run_id` is set, and `have`
    counts its bytes of node 0's files. `terms` must be the same on all nodes.
    """

    token: str
    node: str
    host: str
    terms: str
    run_id: str = ""
    have: dict[str, int] = {}


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node takes part; node 0 has `have_bytes` of its file, in `directory` on `host`."""

    run_id: str
    job_id: int
    directory: str
    host: str
    have_bytes: int = 0


class Piece(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes of a file, from `at` on; without bytes it says that the sender is there."""

    file: str = ""
    at: int = 0
    data: bytes = b""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message. `why` is empty if the sender has all that it needs.

    From a node: `for_all` if the whole run is to end.
    """

    why: str = ""
    for_all: bool = False


_Message = Hello | Welcome | Piece | End
_decoder = JsonDecoder[_Message](_Message)


class Cut(Exception):
    """The other side is gone, or sent what cannot be."""


class Unreachable(ChannelError):
    """Node 0 took part, and is gone."""


class Link:
    """One connection, on which every message is authenticated."""

    def __init__(self, streams: Any, own: bytes, other: bytes) -> None:
        self._reader, self._writer = streams
        self._own, self._other, self._key = own, other, b""
        self._sent = self._received = 0
        self._news_s = time.monotonic()

    async def open(self, secret: bytes) -> None:
        """Exchange nonces with the other side, and make a key.

        Raises:
            Cut: it does not answer, or not like slurm-health.
        """
        nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._writer.write(b"%s %s\n" % (_MAGIC, nonce))
        magic, _, other = (await self._line(_HANDSHAKE_S)).partition(b" ")
        if magic != _MAGIC:
            raise Cut(_FOREIGN)
        both = sorted([self._own + nonce, self._other + other])
        self._key = hmac.digest(secret, b" ".join(both), "sha256")

    def host(self, end: str) -> str:
        """Return the address of one end: `peername` or `sockname`."""
        address = self._writer.get_extra_info(end) or ("an unknown address",)
        return str(address[0]).removeprefix("::ffff:")

    def send(self, message: _Message) -> None:
        """Send a message, as soon as the connection takes it."""
        text = msgspec.json.encode(message)
        self._writer.write(b"%s %s\n" % (self._mac(self._own, self._sent, text), text))
        self._sent += 1

    async def receive(self, limit_s: float = _HANDSHAKE_S) -> _Message:
        """Return the next message.

        Raises:
            Cut: none comes in time, none can come any more, or it is none of this protocol.
            UsageError: it is signed with another secret.
        """
        mac, _, text = (await self._line(limit_s)).partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, text)):
            raise UsageError("it has another secret")
        self._received += 1
        try:
            return _decoder.decode(text)
        except ValueError as err:
            raise Cut("it sent an impossible message") from err

    async def _line(self, limit_s: float) -> bytes:
        try:
            line = bytes(await asyncio.wait_for(self._reader.readline(), limit_s))
        except TimeoutError:
            raise Cut(f"nothing was received from it for {limit_s:g} s") from None
        except ValueError:
            raise Cut(_FOREIGN) from None
        except OSError as err:
            raise Cut(err.strerror or str(err)) from err
        if not line.endswith(b"\n"):
            raise Cut("the connection was closed")
        return line[:-1]

    async def mirror(
        self,
        own: Callable[[], Iterable[Path]],
        theirs: dict[str, int],
        directory: Path,
        have: dict[str, int],
        expects: Callable[[str], bool],
    ) -> End:
        """Mirror both ways until the other side ends it; return its last word.

        Args:
            own: the files to send, at any time.
            theirs: how many bytes of each the other side has.
            directory: takes the files that the other side sends.
            have: how many bytes of each are here.
            expects: tells whether the other side may send a file of this name.

        Raises:
            Cut, UsageError: as `receive`.
            JournalError: what the other side sends cannot be written here.
        """
        sender = asyncio.create_task(self._send_files(own, theirs))
        try:
            while True:
                match await self.receive(_SILENT_S):
                    case End() as end:
                        return end
                    case Piece(data=b""):
                        pass
                    case Piece(file=name, at=at, data=data) if expects(name) and at == have.get(
                        name, 0
                    ):
                        have[name] = at + _append(directory / name, at, data)
                        self._news_s = time.monotonic()
                    case _:
                        raise Cut("it sent an impossible message")
        finally:
            sender.cancel()

    async def _send_files(self, own: Callable[[], Iterable[Path]], theirs: dict[str, int]) -> None:
        alive_s = 0.0
        with contextlib.suppress(OSError):  # `receive` reports it
            while True:
                for file in own():
                    at = theirs.get(file.name, 0)
                    with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
                        if data := os.pread(opened.fileno(), _PIECE_BYTES, at):
                            self.send(Piece(file=file.name, at=at, data=data))
                            theirs[file.name] = at + len(data)
                            self._news_s = time.monotonic()
                if time.monotonic() - alive_s > _ALIVE_S:
                    alive_s = time.monotonic()
                    self.send(Piece())
                await self._writer.drain()
                idle = time.monotonic() - self._news_s > _IDLE_S
                await asyncio.sleep(_IDLE_POLL_S if idle else _POLL_S)

    def end(self, last_word: End) -> None:
        """Send a last word; nothing follows it."""
        with contextlib.suppress(OSError):
            self.send(last_word)
            self._writer.write_eof()

    async def drain(self) -> None:
        """Wait a moment for the other side to read a last word and close.

        What has arrived and is not read would make the kernel drop what was sent.
        """
        with contextlib.suppress(OSError):  # a TimeoutError, too
            await asyncio.wait_for(self._reader.read(), _LAST_WORD_S)

    def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()

    def _mac(self, sender: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d %s" % (sender, number, text), "sha256").hex().encode()


def is_shared(name: str) -> bool:
    """Tell whether a file of node 0's is for all nodes: the orders, and the step's."""
    return "/" not in name and name.startswith(("orders", "step"))


def _append(path: Path, at: int, data: bytes) -> int:
    """Append to a file; return how many bytes.

    Raises:
        Cut: it has more than any start writes.
        JournalError: it cannot be written.
    """
    if at + len(data) > _MOST_FILE_BYTES:
        raise Cut("it sent more than any start writes")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as file:
            return file.write(data)
    except OSError as err:
        raise JournalError(path, f"cannot be written: {err.strerror}") from err


class _Side:
    """One side of the channel: an asyncio loop in a thread of its own."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, last_word: End | None = None) -> None:
        """Close all connections, with a last word; nothing if that was done before."""
        if self._thread.is_alive():
            self._call(self._part(last_word))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _part(self, last_word: End | None) -> None:
        self._closing = True
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if last_word is not None:
            for link in self._links:
                link.end(last_word)
            if tasks:  # they end when the other side has closed
                await asyncio.wait(tasks, timeout=_LAST_WORD_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        # Signals are the main thread's, which may be starting a child just then.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self._loop.run_forever()
        self._loop.close()


@dataclass(kw_only=True)
class Peer:
    """One of the other nodes, as node 0 knows it.

    `have` counts the bytes of its file here. `token` is empty until its process has come; `link` is
    None while there is no connection, since `lost_s`; `end` while it may come again.
    """

    have: dict[str, int]
    token: str = ""
    host: str = ""
    link: Link | None = None
    lost_s: float = 0.0
    end: End | None = None


class NodeZero(_Side):
    """Node 0's side: listens where the nodes meet, and mirrors to and from each of them."""

    def __init__(
        self,
        meeting: NodeZeroAddress,
        secret: bytes,
        welcome: Welcome,
        terms: str,
        nodes: Sequence[str],
        say: Say,
    ) -> None:
        """Open the port for the other `nodes`; `welcome` is for each of them.

        Raises:
            ChannelError: the port is taken, or may not be opened.
        """
        listener = _listener(meeting)
        super().__init__()
        self._secret, self._welcome, self._terms = secret, welcome, terms
        self._directory = Path(welcome.directory)
        self.at = meeting.text
        self._say, self._reported = say, set[str]()
        self._visitors: dict[asyncio.Task[None], None] = {}
        self.peers = {node: Peer(have={f"{node}.jsonl": 0}) for node in nodes}
        serving = asyncio.start_server(self._visit, sock=listener, limit=_MOST_BYTES)
        self._server = self._call(serving)

    def raise_interrupt(self) -> None:
        """Raise SystemExit if Ctrl-C on another node has ended the run."""
        if any(peer.end is not None and peer.end.for_all for peer in self.peers.values()):
            raise SystemExit(128 + signal.SIGINT)

    @property
    def connected(self) -> list[str]:
        """The nodes that are there."""
        return [node for node, peer in self.peers.items() if peer.link is not None]

    async def _part(self, last_word: End | None) -> None:
        self._server.close()
        await super()._part(last_word)

    async def _visit(self, *streams: Any) -> None:
        """Serve one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._visitors) >= _MOST_VISITORS:
            next(iter(self._visitors)).cancel()
        self._visitors[task] = None
        link = Link(streams, b"node0", b"node")
        try:
            await link.open(self._secret)
            hello = await link.receive()
            if isinstance(hello, Hello):  # it has proven that it knows the secret
                del self._visitors[task]
                await self._serve(hello, link)
        except UsageError as err:
            self._report(f"{link.host('peername')} is refused: {err}")
            link.end(End(why=str(err)))  # if for its secret, the MAC shows that too
            await link.drain()
        except (Cut, OSError):  # no node of this run
            pass
        finally:
            self._visitors.pop(task, None)
            link.close()

    async def _serve(self, hello: Hello, link: Link) -> None:
        """Mirror to and from a node until it leaves or the connection breaks.

        Raises:
            UsageError: the node may not take part.
        """
        host = cut(f"{one_line(hello.host)} ({link.host('peername')})", _SHOWN)
        if hello.terms != self._terms:
            raise UsageError(f"{host} has {cut(one_line(hello.terms), 99)}; node0: {self._terms}")
        node = hello.node
        if node not in self.peers:
            others = f"the nodes beside {self._welcome.host} are {fold(self.peers)}"
            raise UsageError(f"{host} is {cut(one_line(node), 99)}; {others} (NODE_RANK)")
        peer = self.peers[node]
        # A process that comes in the place of one that is gone takes part from now on.
        if peer.token not in ("", hello.token) and peer.link is not None:
            raise UsageError(f"{host} is {node}, like {peer.host}: give each its own NODE_RANK")
        if hello.run_id not in ("", self._welcome.run_id):
            raise UsageError("node0 was started again since: start all nodes again")
        if peer.link is not None:
            peer.link.close()
        peer.token, peer.host, peer.link, peer.end = hello.token, host, link, None
        self._links.append(link)

        link.send(msgspec.structs.replace(self._welcome, have_bytes=peer.have[f"{node}.jsonl"]))
        try:
            peer.end = await link.mirror(
                lambda: [path for path in self._directory.iterdir() if is_shared(path.name)],
                dict(hello.have),
                self._directory,
                peer.have,
                peer.have.__contains__,
            )
            if peer.end.why:
                self._report(f"{node} ({host}) was ended by {one_line(peer.end.why)}")
        except (Cut, JournalError) as err:
            self._report(f"{node} ({host}): {err}")
        finally:
            self._links.remove(link)
            if peer.link is link:
                peer.link, peer.lost_s = None, time.monotonic()

    def _report(self, text: str) -> None:
        """Report something once, and not too much."""
        if not self._closing and text not in self._reported and len(self._reported) < _MOST_REPORTS:
            self._reported.add(text)
            self._say(cut(text, _SHOWN))


def _listener(meeting: NodeZeroAddress) -> socket.socket:
    """Return a socket that listens at the port of a meeting.

    Raises:
        ChannelError: the port is taken, or may not be opened.
    """
    give_up_s, both = time.monotonic() + _PORT_FREE_S, socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    while True:
        try:
            return socket.create_server(
                ("", meeting.port), family=family, backlog=_MOST_VISITORS, dualstack_ipv6=both
            )
        except OSError as err:
            if err.errno != errno.EADDRINUSE or time.monotonic() > give_up_s:
                why = f"node0 cannot listen on port {meeting.port}: {os.strerror(err.errno or 0)}"
                remedy = "give each run on a machine its own MASTER_PORT, above 1023"
                raise ChannelError(meeting.text, f"{why}; {remedy}") from err
        time.sleep(_PAUSE_S)


class OtherNode(_Side):
    """Another node's side: connects to node 0, and again when it is cut off."""

    def __init__(
        self, meeting: NodeZeroAddress, secret: bytes, hello: Hello, file: Path, say: Say
    ) -> None:
        """Begin to connect; `file` is mirrored to node 0, and its files to where that is."""
        super().__init__()
        self._meeting, self._secret, self._hello, self._say = meeting, secret, hello, say
        self._file = file
        self._have: dict[str, int] = {}  # of node 0's files
        self.own_host = ""
        self.lasts = False  # node 0 may be cut off for any time
        self.welcome: Welcome | None = None
        self._over = asyncio.run_coroutine_threadsafe(self._stay_connected(), self._loop)

    def join(self) -> Welcome:
        """Wait until node 0 has let this node in.

        Raises:
            ChannelError, UsageError: nothing answers, or node 0 refuses this node.
        """
        while self.welcome is None:
            self.raise_failure()
            time.sleep(_POLL_S)
        return self.welcome

    def raise_failure(self) -> None:
        """Raise what has ended the connection for good, if anything has.

        Raises:
            ChannelError: node 0 has ended the run, or is gone.
            JournalError: this node cannot use its own directory.
            UsageError: node 0 does not want this node back.
        """
        if self._over.done():
            self._over.result()

    async def _stay_connected(self) -> None:
        """Connect, mirror, and connect again, until that is in vain; raise as `raise_failure`."""
        at, reported = self._meeting.text, False
        since_s = time.monotonic()
        while not self._closing:
            try:
                await self._connect()
                since_s = time.monotonic()  # it was connected, and is cut off
                continue
            except (Cut, OSError) as err:
                why = getattr(err, "strerror", "") or str(err) or "no answer"
            for_s = time.monotonic() - since_s
            if self.welcome is not None and for_s > CUT_S and not self.lasts:
                again = "its own output may say why. Start all nodes again"
                raise Unreachable(at, f"node0 has ended, or cannot be reached: {why}; {again}")
            if self.welcome is None and for_s > JOIN_S:
                raise ChannelError(
                    at,
                    f"node0 could not be reached within {JOIN_S:g} s: {why}; does it run, with"
                    " NODE_RANK=0, on the machine that MASTER_ADDR names, and may this one connect"
                    " to that port? (a firewall may prevent it, or another program have the port:"
                    " MASTER_PORT chooses another)",
                )
            if self.welcome is None and not reported and for_s > _REPORT_S:
                reported = True
                self._say(f"waiting for node0 at {at}: {why}")
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self) -> None:
        """Connect, and mirror until the connection breaks; raise as `raise_failure`.

        An OSError or Cut: there is no connection, or what answers is not node 0 of a run.
        """
        at, link = self._meeting.text, await self._linked()
        try:
            await link.open(self._secret)
            link.send(msgspec.structs.replace(self._hello, have=self._have))
            end = welcome = await link.receive()
            if isinstance(welcome, Welcome):
                if self.welcome is not None:
                    self._say(f"connected to node0 at {at} again")
                self._hello = msgspec.structs.replace(self._hello, run_id=welcome.run_id)
                self.own_host, self.welcome = link.host("sockname"), welcome
                self._links = [link]
                file, theirs = self._file, {self._file.name: welcome.have_bytes}
                if file.stat().st_size < welcome.have_bytes:  # of a process before this one
                    os.truncate(file, welcome.have_bytes)
                end = await link.mirror(lambda: [file], theirs, file.parent, self._have, is_shared)
        except Cut as err:
            if not self._links:
                raise
            if not self._closing:
                self._say(f"connection to node0 at {at} lost ({err}); connecting again")
            return
        except UsageError as err:
            known = "give all the same SLURM_HEALTH_SECRET, or --rdzv-id"
            raise UsageError(f"node0 at {at}: {err} than this node; {known}") from err
        finally:
            self._links = []
            link.close()
        if not isinstance(end, End):
            raise Cut(_FOREIGN)
        if self.welcome is None:
            raise UsageError(f"node0 at {at} refuses this node: {one_line(end.why)}")
        raise ChannelError(at, f"the run was ended: {one_line(end.why)}")

    async def _linked(self) -> Link:
        """Return a connection to node 0, by IPv4 if there is any: the probes prefer it."""
        host, port = self._meeting.host, self._meeting.port
        failure = OSError("no address")
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                opening = asyncio.open_connection(host, port, family=family, limit=_MOST_BYTES)
                return Link(await asyncio.wait_for(opening, _ATTEMPT_S), b"node", b"node0")
            except OSError as err:
                # Where a host has no address of a family, the other one's failure counts.
                failure = failure if isinstance(err, socket.gaierror) else err
        raise failure
