# SPDX-License-Identifier: Apache-2.0
"""Another node's end of the channel: connects to node 0, and connects again when it is cut off."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from slurm_health.records.errors import ChannelError, JournalError, UsageError
from slurm_health.records.record_codec import Entry, decode
from slurm_health.records.text import one_line
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.connection import Closed, Connection
from slurm_health.torchrun.channel.messages import Hello, MasterLine, NodeRefused, Proof, Welcome

# Node 0 may still be on its way: its machine boots, or its image is loaded.
JOIN_S = 180.0
# What answers for so long, and not like node 0, will not be node 0.
NOT_OURS_S = 15.0
# Where its port refuses for so long after it was there, its process is gone.
GONE_S = 5.0
# So long an interruption of the network is waited out.
CUT_S = 30.0
_ATTEMPT_S = 5.0
_PAUSE_S = 0.25
_SAY_AFTER_S = 5.0


class EndedByNodeZero(ChannelError):
    """Node 0 has ended the run, or is gone."""


class NobodyThere(ChannelError):
    """What answers at the meeting point is no slurm-health: perhaps the training, long begun."""


class OtherNode:
    """One node's connection to node 0, over as many sockets as it takes."""

    def __init__(
        self,
        meeting: NodeZeroAddress,
        secret: bytes,
        hello: Hello,
        say: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meeting = meeting
        self._secret = secret
        self._hello = msgspec.structs.replace(hello, token=secrets.token_hex(16))
        self._say = say
        self._monotonic = monotonic
        self._connection: Connection | None = None
        self._early: list[bytes] = []  # what came with the welcome
        self._file: Path | None = None
        self._sent_bytes = 0
        self._left = False
        self._heard = 0
        self._directory = ""
        self._heard_s = self._alive_s = monotonic()
        self._cut_s = 0.0
        self._refused_s: float | None = None
        self._retry_s = 0.0

    @property
    def own_host(self) -> str:
        """This machine's address, as node 0 sees it."""
        assert self._connection is not None
        return self._connection.own_host

    def join(self) -> Welcome:
        """Connect, for as long as node 0 may take to be there.

        Raises:
            UsageError: node 0 refuses this node.
            NobodyThere: something else answers.
            ChannelError: nothing does.
        """
        begun_s = unanswered_s = self._monotonic()
        told = False
        while True:
            try:
                return self._connect()
            except Closed as err:
                why = str(err)
                if self._monotonic() - unanswered_s > NOT_OURS_S:
                    raise self._not_ours(why) from err
            except OSError as err:
                why, unanswered_s = _words(err), self._monotonic()
            waited_s = self._monotonic() - begun_s
            if waited_s > JOIN_S:
                raise self._never(why)
            if not told and waited_s > _SAY_AFTER_S:
                told = True
                self._say(f"waiting for node0 at {self._meeting.text}: {why}")
            time.sleep(_PAUSE_S)

    def ship(self, file: Path) -> None:
        """Have what is written to this file sent to node 0, from its beginning."""
        self._file = file

    def exchange(self, timeout_s: float, also: Collection[int] = ()) -> list[Entry]:
        """Send what is new, and return what node 0 has said, after this time at most.

        Returns earlier when something arrives, or one of the descriptors `also` becomes readable.

        Raises:
            EndedByNodeZero: node 0 has ended the run, or is gone for good.
            UsageError: node 0 does not want this node back.
            JournalError: node 0 cannot use its journal.
        """
        connection = self._connection or self._reconnected()
        if connection is None:
            select.select(list(also), [], [], min(timeout_s, _PAUSE_S))
            return []
        try:
            self._send_new(connection)
            self._keep_alive(connection)
            if self._early:
                return self._heard_on(connection)
            writes = [connection] if connection.waits_to_send else []
            reads: list[Connection | int] = [connection, *also]
            ready, writable, _ = select.select(reads, writes, [], timeout_s)
            if writable:
                connection.flush()
            return self._heard_on(connection) if connection in ready else []
        except Closed as err:
            self._cut(str(err))
            return []

    def leave(self, why: str, *, for_all: bool) -> None:
        """Tell node 0 that this node ends."""
        self._left = True
        if self._connection is not None:
            with contextlib.suppress(Closed):
                self._connection.send(messages.encode(messages.Leaving(why=why, for_all=for_all)))

    def close(self) -> None:
        """Close the connection, once what was said has gone out."""
        if self._connection is not None:
            self._connection.close(messages.LINGER_S if self._left else 0.0)
            self._connection = None

    # --- one connection -----------------------------------------------------------------------

    def _connect(self) -> Welcome:
        """Connect once.

        Raises:
            OSError: there is no connection.
            Closed: who answers is not node 0 of a run.
            UsageError: node 0 refuses this node.
        """
        found = _connected(self._meeting)
        # An interrupt leaves it open, for this node's last word.
        self._connection = connection = Connection(found, messages.MOST_BYTES)
        try:
            welcome = self._introduced(connection)
        except Exception:
            connection.close()
            self._connection = None
            raise
        self._heard_s = self._alive_s = self._monotonic()
        self._refused_s = None
        self._sent_bytes = welcome.have_bytes
        self._directory = one_line(welcome.directory)
        self._hello = msgspec.structs.replace(self._hello, run_id=welcome.run_id)
        return welcome

    def _introduced(self, connection: Connection) -> Welcome:
        nonce = secrets.token_hex(16)
        hello = msgspec.structs.replace(self._hello, nonce=nonce, heard=self._heard)
        connection.send(messages.encode(hello))
        until_s = self._monotonic() + messages.HANDSHAKE_S
        lines: list[bytes] = []
        while True:
            while not lines:
                left_s = until_s - self._monotonic()
                if left_s <= 0 or not select.select([connection], [], [], left_s)[0]:
                    raise Closed("what listens there does not answer like slurm-health")
                lines = connection.read()
            message = _decoded(lines.pop(0))
            match message:
                case messages.Challenge():
                    self._check(hello, message)
                    given = messages.proof(self._secret, "node", hello, message.nonce)
                    connection.send(messages.encode(Proof(proof=given)))
                case NodeRefused(why=why):
                    raise UsageError(
                        f"node0 at {self._meeting.text} refuses this node: {one_line(why)}"
                    )
                case Welcome():
                    self._early = lines
                    return message
                case _:
                    raise Closed("what listens there does not answer like slurm-health")

    def _check(self, hello: Hello, challenge: messages.Challenge) -> None:
        """Make sure that this is node 0 of our run.

        Raises:
            UsageError: it has another secret.
        """
        ours = messages.proof(self._secret, "node0", hello, challenge.nonce)
        if messages.proves(challenge.proof, ours):
            return
        if challenge.secret and not self._secret:
            why = "it has a secret and this node has none"
        elif self._secret and not challenge.secret:
            why = "this node has a secret and it has none"
        else:
            why = "it has another secret than this node"
        raise UsageError(
            f"node0 at {self._meeting.text}: {why}; give all nodes the same SLURM_HEALTH_SECRET or"
            " --secret-file"
        )

    def _send_new(self, connection: Connection) -> None:
        """Send whole lines that the file has beyond what node 0 has."""
        while self._file is not None and not connection.waits_to_send:
            with self._file.open("rb") as file:
                data = os.pread(file.fileno(), messages.LINES_BYTES, self._sent_bytes)
                if b"\n" not in data and len(data) == messages.LINES_BYTES:
                    data = os.pread(file.fileno(), messages.MOST_BYTES // 2, self._sent_bytes)
            data = data[: data.rfind(b"\n") + 1]
            if not data:
                return
            # Latin-1 has all bytes: a process that was killed may have left any.
            lines = messages.Lines(at_bytes=self._sent_bytes, text=data.decode("latin-1"))
            connection.send(messages.encode(lines))
            self._sent_bytes += len(data)

    def _keep_alive(self, connection: Connection) -> None:
        now_s = self._monotonic()
        if now_s - self._heard_s > messages.SILENT_S:
            raise Closed(f"nothing was heard from it for {messages.SILENT_S:g} s")
        if now_s - self._alive_s > messages.ALIVE_S:
            self._alive_s = now_s
            connection.send(messages.encode(messages.Alive()))

    def _heard_on(self, connection: Connection) -> list[Entry]:
        found = []
        early, self._early = self._early, []
        for line in [*early, *connection.read()]:
            self._heard_s = self._monotonic()
            match _decoded(line):
                case MasterLine(number=number, line=text) if number == self._heard:
                    self._heard += 1
                    found.append(_entry(text))
                case messages.Alive():
                    pass
                case messages.Ended(why=why, unchecked=True):
                    raise JournalError(Path(self._directory), one_line(why))
                case messages.Ended(why=why):
                    raise EndedByNodeZero(self._meeting.text, f"the run was ended: {one_line(why)}")
                case _:
                    raise Closed("node0 sent a message that makes no sense")
        if found:
            connection.send(messages.encode(messages.Heard(count=self._heard)))
        return found

    # --- cut off -------------------------------------------------------------------------------

    def _cut(self, why: str) -> None:
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        self._cut_s = self._retry_s = self._monotonic()
        self._refused_s = None
        self._say(f"connection to node0 at {self._meeting.text} lost ({why}); connecting again")

    def _reconnected(self) -> Connection | None:
        """Try to connect again, now and then.

        Raises:
            EndedByNodeZero: it has been in vain for long enough.
        """
        now_s = self._monotonic()
        if now_s < self._retry_s:
            return None
        try:
            self._connect()
        except (OSError, Closed) as err:
            now_s = self._monotonic()
            self._retry_s = now_s + _PAUSE_S
            if isinstance(err, ConnectionRefusedError | Closed):
                self._refused_s = now_s if self._refused_s is None else self._refused_s
                if now_s - self._refused_s > GONE_S:
                    why = _NOT_OURS if isinstance(err, Closed) else _GONE
                    raise EndedByNodeZero(self._meeting.text, why) from err
            elif now_s - self._cut_s > CUT_S:
                raise EndedByNodeZero(self._meeting.text, _cut_off(_words(err))) from err
            return None
        self._say(f"connected to node0 at {self._meeting.text} again")
        return self._connection

    def _not_ours(self, why: str) -> ChannelError:
        return NobodyThere(
            self._meeting.text,
            f"{why}; the others may be training already, or another program has the port: give each"
            " run its own MASTER_PORT",
        )

    def _never(self, why: str) -> ChannelError:
        return ChannelError(
            self._meeting.text,
            f"node0 could not be reached within {JOIN_S:g} s: {why}; does it run, with NODE_RANK=0,"
            " on the machine that MASTER_ADDR names, and may this one connect to that port? (a"
            " firewall may prevent it; MASTER_PORT chooses another)",
        )


_NOT_OURS = "something else answers there by now: perhaps the training has begun without this node"
_GONE = "node0 has ended: its port refuses connections; its own output says why. Start all again"


def _cut_off(why: str) -> str:
    return (
        f"node0 could not be reached again within {CUT_S:g} s: {why}; check that its machine and"
        " the network are up, then start all again"
    )


def _connected(meeting: NodeZeroAddress) -> socket.socket:
    """Return a socket to one of the addresses of a host, IPv4 first: the probes rather have it.

    Raises:
        OSError: none of them answers.
    """
    found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    failure = OSError("no address")
    for family, *_, place in sorted(found, key=lambda each: each[0]):
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.settimeout(_ATTEMPT_S)
            connecting.connect(place)
        except OSError as err:
            connecting.close()
            failure = err
        except BaseException:
            connecting.close()
            raise
        else:
            return connecting
    raise failure


def _words(err: OSError | Closed) -> str:
    if isinstance(err, TimeoutError):
        return "no answer"
    return (err.strerror if isinstance(err, OSError) else None) or str(err)


def _decoded(line: bytes) -> messages.ToNode:
    try:
        return messages.at_node(line)
    except ValueError as err:
        raise Closed("what listens there does not answer like slurm-health") from err


def _entry(text: str) -> Entry:
    try:
        return decode(text.encode())
    except ValueError as err:
        raise Closed(f"node0 sent what is not a record: {err}") from err
