# SPDX-License-Identifier: Apache-2.0
"""Node 0's port, spoken to by nodes, by strangers, and by what only looks like either."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from slurm_health import __version__
from slurm_health.records.errors import ChannelError
from slurm_health.records.record_codec import VERSION, encode
from slurm_health.records.records import (
    AgentEnded,
    AgentStarted,
    MasterWaits,
    Record,
)
from slurm_health.system import journal
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.messages import Hello
from slurm_health.torchrun.channel.node_zero import NodeZero
from slurm_health.torchrun.channel.peers import SharedRun
from slurm_health.torchrun.joint_check import OwnAgent
from tests.support.supervised import eventually
from tests.support.unshared import free_port

NODES = ("node0", "node1", "node2")
SECRET = b"correct horse battery staple"
HELLO = Hello(
    protocol=messages.PROTOCOL,
    nonce="n" * 32,
    slurm_health=__version__,
    rank=1,
    host="second",
    nnodes="3",
    check="network-check",
    rdzv_id="",
    token="mine",
)
DEADLINE_S = 30.0


class Hall:
    """Node 0, which serves until the test is over."""

    def __init__(self, root: Path, nodes: tuple[str, ...] = NODES) -> None:
        self.said: list[str] = []
        self.directory = root / "torchrun" / "7" / "0-2"
        journal.create(self.directory, [journal.MASTER, *nodes])
        self.master = journal.Writer(self.directory, journal.MASTER, time.time)
        self.meeting = NodeZeroAddress(host="127.0.0.1", port=free_port())
        run = SharedRun(
            directory=self.directory,
            run_id="r1",
            job_id=7,
            nodes=nodes,
            nnodes="3",
            check="network-check",
            rdzv_id="",
        )
        agent = OwnAgent("node0", lambda *_: [], {})
        self.zero = NodeZero(self.meeting, SECRET, run, agent, self.said.append)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def pause(self) -> None:
        """Have it serve nobody any more."""
        self._over.set()
        self._thread.join()

    def close(self) -> None:
        self.pause()
        self.zero.close()

    def written(self, node: str) -> bytes:
        return journal.path_of(self.directory, node).read_bytes()

    def _serve(self) -> None:
        while not self._over.is_set():
            self.zero.wait(0.02, 0.0)


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    found = Hall(tmp_path)
    yield found
    found.close()


class Visitor:
    """A socket to node 0, on which anything can be said."""

    def __init__(self, hall: Hall) -> None:
        self.socket = socket.create_connection(
            (hall.meeting.host, hall.meeting.port), timeout=DEADLINE_S
        )
        self._lines = self.socket.makefile("rb")

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self.socket.close()

    def says(self, said: messages.ChannelMessage | bytes) -> None:
        with contextlib.suppress(OSError):  # it may be cut off in the middle of it
            self.socket.sendall(said if isinstance(said, bytes) else messages.encode(said))

    def hears(self) -> messages.ToNode | None:
        """Return the next message, None where the connection is closed instead."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return messages.at_node(line) if line else None

    def comes_in(self, hello: Hello = HELLO, known: bytes = SECRET) -> messages.ToNode | None:
        """Introduce itself; return what node 0 says to that."""
        self.says(hello)
        challenge = self.hears()
        if not isinstance(challenge, messages.Challenge):
            return challenge
        proof = messages.proof(known, "node", hello, challenge.nonce)
        self.says(messages.Proof(proof=proof))
        return self.hears()

    def hears_records(self, count: int) -> list[messages.MasterLine]:
        found: list[messages.MasterLine] = []
        while len(found) < count:
            message = self.hears()
            assert message is not None
            if isinstance(message, messages.MasterLine):
                found.append(message)
        return found


def line_of(record: Record, writer: str = "node1") -> str:
    return encode(record, entry_id=f"{writer}:0", time_s=1.0).decode()


STARTED = AgentStarted(node="node1", launch=0, hostname="second", address="10.0.0.2")
LINE = line_of(STARTED)


def test_who_is_refused_is_told_by_the_name_of_the_node_and_not_by_its_place(
    tmp_path: Path,
) -> None:
    """Before a restart, those that are left are counted anew."""
    with contextlib.closing(Hall(tmp_path, ("node0", "node2"))) as hall:
        for rank, known in ((1, b"another"), (7, SECRET)):
            with Visitor(hall) as node:
                said = node.comes_in(msgspec.structs.replace(HELLO, rank=rank), known)
            assert isinstance(said, messages.NodeRefused)

    assert "second (127.0.0.1), as node2, is refused: it has another secret" in hall.said[0]
    assert hall.said[1].startswith("second (127.0.0.1) is refused: its rank is 7")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x00" * 64 + b"\n",
        b"[" * 4000 + b"\n",
        b'{"x":' + b"[" * 4000 + b"\n",
        b"x" * (messages.MOST_UNPROVEN_BYTES + 1),
        b'{"say":"hello"}\n',
        messages.encode(messages.Proof(proof="")),
        messages.encode(messages.Lines(at_bytes=0, text=LINE)),
        messages.encode(messages.Leaving(why="I want so", for_all=True)),
        messages.encode(HELLO) + messages.encode(HELLO),
    ],
)
def test_a_stranger_is_sent_away_and_nothing_is_written(hall: Hall, said: bytes) -> None:
    with Visitor(hall) as stranger:
        stranger.says(said)
        while (answer := stranger.hears()) is not None:
            assert isinstance(answer, messages.Challenge)
    with Visitor(hall) as node:
        assert isinstance(node.comes_in(), messages.Welcome)
    assert hall.written("node1") == b""


def test_many_strangers_keep_no_node_out(hall: Hall) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(Visitor(hall)).says(b"half a li")
        node = stack.enter_context(Visitor(hall))
        assert isinstance(node.comes_in(), messages.Welcome)
    assert len(hall.said) < 30


def test_who_does_not_know_the_secret_does_not_come_in(hall: Hall) -> None:
    with Visitor(hall) as stranger:
        answer = stranger.comes_in(known=b"")
        assert isinstance(answer, messages.NodeRefused)
        assert "another secret" in answer.why


def test_node_0_proves_that_it_knows_the_secret(hall: Hall) -> None:
    with Visitor(hall) as node:
        node.says(HELLO)
        challenge = node.hears()
        assert isinstance(challenge, messages.Challenge)
        assert challenge.proof == messages.proof(SECRET, "node0", HELLO, challenge.nonce)
        # What node 0 says is no answer to what node 0 asks.
        node.says(messages.Proof(proof=challenge.proof))
        assert isinstance(node.hears(), messages.NodeRefused)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"slurm_health": "0.0.9"}, f"it has slurm-health 0.0.9, node0 has {__version__}"),
        ({"protocol": 2}, "install the same on all"),
        ({"nnodes": "4"}, "it has --nnodes 4, node0 has 3"),
        ({"check": "straggler-detection"}, "node0 has network-check"),
        ({"rdzv_id": "a7"}, "it has --rdzv-id a7, node0 has none"),
        ({"rank": 0}, "rank 0 is taken by"),
        ({"rank": 3}, "ranks count from 0"),
        ({"rank": -1}, "ranks count from 0"),
        ({"run_id": "r0"}, "node0 was started again since"),
        ({"run_id": "r1"}, "node0 was started again since"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why(
    hall: Hall, change: dict[str, object], why: str
) -> None:
    with Visitor(hall) as node:
        answer = node.comes_in(msgspec.structs.replace(HELLO, **change))
        assert isinstance(answer, messages.NodeRefused)
        assert why in answer.why
    eventually(lambda: any(why in each for each in hall.said), "node 0 says so too")


def test_a_second_node_of_a_rank_is_refused_and_the_first_stays(hall: Hall) -> None:
    with Visitor(hall) as first, Visitor(hall) as second:
        assert isinstance(first.comes_in(), messages.Welcome)
        answer = second.comes_in(msgspec.structs.replace(HELLO, token="another"))
        assert isinstance(answer, messages.NodeRefused)
        assert "rank 1 is taken by second (127.0.0.1)" in answer.why
        first.says(messages.Lines(at_bytes=0, text=LINE))
        eventually(lambda: hall.written("node1") == LINE.encode(), "the first is heard")


@pytest.mark.parametrize("nodes", [("node0", "node2", "node1"), ("node0", "node2")])
def test_after_a_restart_a_rank_is_the_place_among_the_nodes_that_are_left(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    line = line_of(AgentEnded(node="node2", launch=0, reason=""), "node2")
    hall = Hall(tmp_path, nodes)
    with contextlib.closing(hall), Visitor(hall) as node:
        assert isinstance(node.comes_in(), messages.Welcome)
        node.says(messages.Lines(at_bytes=0, text=line))
        eventually(lambda: hall.written("node2") == line.encode(), "it is heard")


def test_what_a_node_writes_stands_in_its_file_as_it_is(hall: Hall) -> None:
    ended = line_of(AgentEnded(node="node1", launch=0, reason="nicht möglich: \x7f"))
    with Visitor(hall) as node:
        node.comes_in()
        for at, text in ((0, LINE), (len(LINE), ended.encode().decode("latin-1"))):
            node.says(messages.Lines(at_bytes=at, text=text))
        eventually(lambda: hall.written("node1") == (LINE + ended).encode(), "both lines")
    assert journal.read_all(hall.directory, "node1")[0].record == STARTED


def test_a_line_that_was_left_torn_is_left_out(hall: Hall) -> None:
    torn = LINE[:20] + "\n"
    with Visitor(hall) as node:
        node.comes_in()
        node.says(messages.Lines(at_bytes=0, text=torn + LINE))
        eventually(lambda: hall.written("node1") == LINE.encode(), "the whole line")
    with Visitor(hall) as again:
        welcome = again.comes_in(msgspec.structs.replace(HELLO, run_id="r1"))
        assert isinstance(welcome, messages.Welcome)
        assert welcome.have_bytes == len(torn + LINE)


@pytest.mark.parametrize(
    ("at_bytes", "text"),
    [
        (0, line_of(msgspec.structs.replace(STARTED, node="node2"))),
        (0, line_of(STARTED, writer="node2")),
        (0, line_of(MasterWaits(reason="for you"))),
        (0, line_of(STARTED, writer="master")),
        (0, LINE.replace(f'"v":{VERSION}', f'"v":{VERSION + 1}')),
        (0, LINE.rstrip("\n")),
        (5, LINE),
        (-1, LINE),
        (0, "\u2026\n"),
    ],
)
def test_what_a_node_may_not_write_is_not_written(hall: Hall, at_bytes: int, text: str) -> None:
    with Visitor(hall) as node:
        node.comes_in()
        node.says(messages.Lines(at_bytes=at_bytes, text=text))
        while node.hears() is not None:
            pass
    eventually(lambda: any("node1" in each for each in hall.said), "node 0 says so")
    assert all(hall.written(node) == b"" for node in ("node1", "node2"))
    with Visitor(hall) as again:  # its process is the same, and may do better
        assert isinstance(again.comes_in(), messages.Welcome)


def test_a_node_that_sends_what_is_nested_without_end_is_left_and_the_others_stay(
    hall: Hall,
) -> None:
    with Visitor(hall) as node:
        node.comes_in()
        node.says(b'{"x":' + b"[" * 100_000 + b"\n")
        while node.hears() is not None:
            pass
    eventually(
        lambda: any("it sent an impossible message" in each for each in hall.said), "it is left"
    )
    with Visitor(hall) as again:
        assert isinstance(again.comes_in(), messages.Welcome)


def test_a_node_that_comes_again_hears_what_it_missed(hall: Hall) -> None:
    words = [MasterWaits(reason=f"for {number}") for number in range(3)]
    with Visitor(hall) as node:
        node.comes_in()
        hall.master.append(words[0])
        assert [told.number for told in node.hears_records(1)] == [0]
    hall.master.append(*words[1:])
    with Visitor(hall) as again:
        again.comes_in(msgspec.structs.replace(HELLO, run_id="r1", heard=1))
        assert [told.number for told in again.hears_records(2)] == [1, 2]


def test_a_node_that_was_there_from_the_beginning_or_late_hears_the_same(hall: Hall) -> None:
    hall.master.append(MasterWaits(reason="for nodes"))
    with Visitor(hall) as late:
        late.comes_in()
        (told,) = late.hears_records(1)
        assert "for nodes" in told.line


def test_a_last_word_arrives_though_the_node_was_speaking_itself(hall: Hall) -> None:
    with Visitor(hall) as visitor:
        visitor.comes_in()
        hall.pause()
        visitor.says(messages.Lines(at_bytes=0, text=line_of(AgentEnded(node="node1", launch=0))))
        hall.zero.end("node0 was ended by SIGINT")
        assert visitor.hears() == messages.Ended(why="node0 was ended by SIGINT")


@pytest.mark.heavy
def test_a_port_that_another_has_is_named(hall: Hall) -> None:
    again = SharedRun(
        directory=hall.directory,
        run_id="r2",
        job_id=7,
        nodes=NODES,
        nnodes="3",
        check="network-check",
        rdzv_id="",
    )
    agent = OwnAgent("node0", lambda *_: [], {})
    with pytest.raises(ChannelError, match="give each run on a machine its own MASTER_PORT"):
        NodeZero(hall.meeting, SECRET, again, agent, hall.said.append)
