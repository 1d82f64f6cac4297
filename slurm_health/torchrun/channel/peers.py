# SPDX-License-Identifier: Apache-2.0
"""The other nodes of a run, as node 0 knows them: what each sends, and what it is sent.

A node's lines are appended to its file in the journal. Of what the master writes there each node is
sent its part, and again what it missed while it was cut off.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from slurm_health import __version__
from slurm_health.records import records
from slurm_health.records.record_codec import VERSION, Entry, NewerVersion, decode, encode
from slurm_health.records.text import cut, one_line
from slurm_health.system import journal
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.connection import Closed, Connection
from slurm_health.torchrun.channel.messages import Hello, MasterLine, Welcome

# All that a node may write in one check.
_MOST_FILE_BYTES = 256 << 20
_SHOWN = 200
# As of a process that is ended by Ctrl-C.
_SIGINT_CODE = 130


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """What node 0 tells the others of the run, and what must be the same on all of them."""

    directory: Path
    run_id: str
    job_id: int
    nodes: tuple[str, ...]
    nnodes: str
    check: str
    rdzv_id: str


@dataclass
class Peer:
    """One of the other nodes, from its first welcome on."""

    node: str
    writer: journal.Writer
    token: str = ""
    host: str = ""
    connection: Connection | None = None
    have_bytes: int = 0
    told: list[bytes] = field(default_factory=list)
    heard: int = 0
    seen_s: float = 0.0
    lost_s: float = 0.0
    left: str = ""
    launch: int = -1
    lost: str = ""

    @property
    def came(self) -> bool:
        """Whether it was ever there."""
        return bool(self.token)


class Peers:
    """All of them. `rung` holds those whose lines have come since it was emptied."""

    def __init__(
        self, run: SharedRun, selector: selectors.BaseSelector, say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._selector = selector
        self._say = say
        self._host = socket.gethostname()
        self._master = journal.Reader(run.directory, journal.MASTER)
        self._chosen: Sequence[str] = ()
        self._over = False
        self._alive_s = 0.0
        self.rung: set[str] = set()
        self._peers = {
            node: Peer(node, journal.Writer(run.directory, node, time.time))
            for node in run.nodes[1:]
        }

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def close(self) -> None:
        """Close all connections."""
        for peer in self:
            self._drop(peer)

    def part(self, message: messages.ChannelMessage) -> None:
        """Close all connections with a last word, which each node has heard if it could be."""
        for peer in self:
            self.send(peer, message)
        until_s = time.monotonic() + messages.LINGER_S
        for peer in self:
            self._drop(peer, max(0.0, until_s - time.monotonic()))

    def attend(self, peer: Peer, connection: object, events: int) -> None:
        """Handle what arrives on a connection, and send what waits."""
        if peer.connection is None or connection is not peer.connection:
            return  # it was replaced, or closed, a moment ago
        try:
            if events & selectors.EVENT_WRITE:
                peer.connection.flush()
            if events & selectors.EVENT_READ:
                for line in peer.connection.read():
                    peer.seen_s = time.monotonic()
                    self._hear(peer, messages.at_node_zero(line))
                    if peer.connection is None:
                        return
        except Closed as err:
            self._lose(peer, str(err))
        except ValueError as err:
            self._lose(peer, f"it sent an impossible message: {err}")
        else:
            self._select(peer)

    def _hear(self, peer: Peer, message: messages.ToNodeZero) -> None:
        match message:
            case messages.Lines(at_bytes=at_bytes, text=text):
                self._copy(peer, at_bytes, text.encode("latin-1"))
            case messages.Heard(count=count):
                peer.heard = count
            case messages.Leaving(why=why, for_all=for_all):
                self._leave(peer, cut(one_line(why), _SHOWN), for_all=for_all)
            case messages.Alive():
                pass
            case _:
                raise ValueError("unexpected message")

    def _copy(self, peer: Peer, at_bytes: int, data: bytes) -> None:
        """Append lines of a node's to its file, if they are the next ones."""
        if at_bytes != peer.have_bytes or not data.endswith(b"\n"):
            raise ValueError("lines out of order")
        if peer.have_bytes + len(data) > _MOST_FILE_BYTES:
            raise ValueError("more lines than any check has")
        peer.have_bytes += len(data)
        kept = [line for line in data.splitlines(keepends=True) if _is_own(line, peer.node)]
        if kept:
            peer.writer.copy(b"".join(kept))
            self.rung.add(peer.node)

    def _leave(self, peer: Peer, why: str, *, for_all: bool) -> None:
        if for_all:
            self._say(f"{peer.node} ({peer.host}) was ended by {why}, and the run with it")
            raise SystemExit(_SIGINT_CODE)
        peer.left = why
        self._lose(peer, f"its process was ended by {why}")

    def welcome(self, hello: Hello, connection: Connection) -> str:
        """Take a node in, or say why not."""
        if why := self._unfit(hello):
            return why
        peer = self._peers[self._run.nodes[hello.rank]]
        if peer.came and peer.token != hello.token:
            return f"rank {hello.rank} is taken by {peer.host}: give each node its own NODE_RANK"
        if hello.run_id and not peer.came:
            return "node0 was started again since: start all nodes again"
        if peer.connection is not None:
            self._drop(peer)
        peer.token = hello.token
        peer.host = cut(f"{one_line(hello.host)} ({connection.peer})", _SHOWN)
        peer.connection = connection
        peer.seen_s = time.monotonic()
        peer.heard = min(max(0, hello.heard), len(peer.told))
        self._selector.register(connection, selectors.EVENT_READ, peer)
        welcome = Welcome(
            run_id=self._run.run_id,
            job_id=self._run.job_id,
            directory=str(self._run.directory),
            host=self._host,
            have_bytes=peer.have_bytes,
        )
        self.send(peer, welcome)
        for line in peer.told[peer.heard :]:
            self._send_line(peer, line)
        return ""

    def _unfit(self, hello: Hello) -> str:
        run = self._run
        if hello.protocol != messages.PROTOCOL or hello.slurm_health != __version__:
            theirs = cut(one_line(hello.slurm_health), 20)
            return f"it has slurm-health {theirs}, node0 has {__version__}: install the same on all"
        for what, theirs, ours in (
            ("--nnodes", hello.nnodes, run.nnodes),
            ("--rdzv-id", hello.rdzv_id, run.rdzv_id),
            ("to check", hello.check, run.check),
        ):
            if theirs != ours:
                told = cut(one_line(theirs), 40)
                return f"it has {what} {told or 'none'}, node0 has {ours or 'none'}"
        if hello.run_id not in ("", run.run_id):
            return "node0 was started again since: start all nodes again"
        if hello.rank == 0:
            return f"rank 0 is taken by {self._host}: give each node its own NODE_RANK"
        if not 0 < hello.rank < len(run.nodes):
            return f"its rank is {hello.rank}, and --nnodes={run.nnodes}: ranks count from 0"
        return ""

    def route(self) -> None:
        """Send to each node what the master has written for it since the last call."""
        for entry in self._master.read_new():
            record = entry.record
            if (
                isinstance(record, records.ActionIntended)
                and record.action is records.Action.PROCEED
            ):
                self._chosen = record.nodes
            if isinstance(record, records.JobOutcome):
                self._tell_addresses()
                self._over = True
            if record is not None:
                for node, part in parts(record, list(self._peers)).items():
                    self._tell(self._peers[node], part, entry)

    def _tell_addresses(self) -> None:
        """Tell all where the first node that trains is, and those that do not."""
        left_out = [node for node in self._run.nodes if node not in self._chosen]
        for node in (*self._chosen[:1], *left_out):
            for entry in journal.read_all(self._run.directory, node):
                if isinstance(entry.record, records.AgentStarted):
                    for peer in self._peers.values():
                        self._tell(peer, entry.record, entry)

    def _tell(self, peer: Peer, record: records.Record, entry: Entry) -> None:
        line = encode(record, entry_id=entry.id, time_s=entry.time_s).decode()
        told = messages.encode(MasterLine(number=len(peer.told), line=line))
        peer.told.append(told)
        self._send_line(peer, told)

    def send(self, peer: Peer, message: messages.ChannelMessage) -> None:
        """Send a message to a node that is there."""
        self._send_line(peer, messages.encode(message))

    def _send_line(self, peer: Peer, line: bytes) -> None:
        if peer.connection is None:
            return
        try:
            peer.connection.send(line)
        except Closed as err:
            self._lose(peer, str(err))
        else:
            self._select(peer)

    def _select(self, peer: Peer) -> None:
        if peer.connection is not None:
            writes = selectors.EVENT_WRITE if peer.connection.waits_to_send else 0
            events = selectors.EVENT_READ | writes
            if self._selector.get_key(peer.connection).events != events:
                self._selector.modify(peer.connection, events, peer)

    def keep_alive(self) -> None:
        """Say that node 0 is there, and notice who is there no more."""
        now_s = time.monotonic()
        if now_s - self._alive_s < messages.ALIVE_S:
            return
        self._alive_s = now_s
        for peer in self._peers.values():
            if peer.connection is not None and now_s - peer.seen_s > messages.SILENT_S:
                self._lose(peer, f"nothing was heard from it for {messages.SILENT_S:g} s")
            self.send(peer, messages.Alive())

    def _lose(self, peer: Peer, why: str) -> None:
        self._drop(peer)
        peer.lost_s = time.monotonic()
        if not (self._over and peer.heard == len(peer.told)):
            self._say(f"{peer.node} ({peer.host}): {why}")

    def _drop(self, peer: Peer, linger_s: float = 0.0) -> None:
        if peer.connection is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close(linger_s)
            peer.connection = None


def _is_own(line: bytes, node: str) -> bool:
    """Tell whether a line is a record that the agent of this node may write.

    One that a process left torn is none.

    Raises:
        ValueError: it is of another node's, or of a newer version.
    """
    try:
        entry = decode(line)
    except NewerVersion as err:
        raise ValueError(f"records of version {err.version}, known {VERSION}") from err
    except ValueError:
        return False
    if entry.id.rpartition(":")[0] != node or getattr(entry.record, "node", None) != node:
        raise ValueError("records that are not its own")
    return True


def parts(record: records.Record, nodes: Sequence[str]) -> Mapping[str, records.Record]:
    """Return what each of `nodes` is to hear of a record; who is not named hears nothing."""
    match record:
        case records.RunStarted():
            return {node: replace(record, nodes=[node]) for node in nodes}
        case records.AgentsLaunched(nodes=launched):
            return {node: replace(record, nodes=[node]) for node in set(launched) & set(nodes)}
        case records.RoundStarted():
            return _of_round(record, nodes)
        case records.GroupAborted(group=group):
            return dict.fromkeys(set(group) & set(nodes), record)
        case records.VerdictReached(nodes=judged):
            return {
                each.node: records.VerdictReached(nodes=[each])
                for each in judged
                if each.node in nodes
            }
        case (
            records.MasterWaits()
            | records.ActionIntended(action=records.Action.PROCEED)
            | records.JobOutcome()
        ):
            return dict.fromkeys(nodes, record)
        case _:
            return {}


def _of_round(record: records.RoundStarted, nodes: Sequence[str]) -> Mapping[str, records.Record]:
    absent, wanted = set(record.absent), set(nodes)
    found: dict[str, records.Record] = {}
    for group, meeting in zip(record.groups, record.rendezvous, strict=True):
        part = replace(
            record,
            groups=[group],
            rendezvous=[meeting],
            absent=[node for node in group if node in absent],
        )
        found |= dict.fromkeys(wanted.intersection(group), part)
    return found
