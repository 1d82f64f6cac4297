# SPDX-License-Identifier: Apache-2.0
"""Both sides of the channel, between real sockets: nodes, strangers, and a relay in between."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.records.errors import ChannelError, ConfigError, UsageError
from slurm_health.torchrun import channel
from slurm_health.torchrun.arguments import Arguments, NodeZeroAddress
from slurm_health.torchrun.channel import (
    Hello,
    Link,
    NodeZero,
    OtherNode,
    Piece,
    Welcome,
)
from slurm_health.torchrun.check import KEY_VARIABLE, key_of, without_secret
from tests.support.rows import rows
from tests.support.supervised import eventually
from tests.support.unshared import free_port

NODES = ("node0", "node1", "node2")
SECRET = b"correct horse battery staple"
TERMS = "slurm-health 1, --nnodes=3"
HELLO = Hello(token="mine", node="node1", host="second", terms=TERMS)
DEADLINE_S = 30.0
START, MAC = b"slh3 " + b"0" * 32 + b"\n", b"0" * 64
FORGED = MAC + b" {}\n"


class Place:
    """A directory of a node, and what it has reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self.reported: list[str] = []

    def read(self, name: str) -> bytes:
        path = self.directory / name
        return path.read_bytes() if path.exists() else b""


class Zero(Place):
    """Node 0."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "zero")
        self.meeting = NodeZeroAddress(host="127.0.0.1", port=free_port())
        self.side = self.again()

    def again(self) -> NodeZero:
        welcome = Welcome(run_id="r1", job_id=7, directory=str(self.directory), host="first")
        return NodeZero(self.meeting, SECRET, welcome, TERMS, NODES[1:], self.reported.append)

    def write(self, name: str, data: bytes) -> None:
        with (self.directory / name).open("ab") as file:
            file.write(data)


@pytest.fixture
def zero(tmp_path: Path) -> Iterator[Zero]:
    found = Zero(tmp_path)
    yield found
    found.side.close()


class Node(Place):
    """Another node, which joins as a context."""

    def __init__(
        self,
        root: Path,
        meeting: NodeZeroAddress,
        *,
        rank: int = 1,
        secret: bytes = SECRET,
        **differing: Any,
    ) -> None:
        super().__init__(root / f"own{rank}{differing.get('token', '')}")
        self.file = self.directory / f"node{rank}.jsonl"
        self.file.touch()
        hello = msgspec.structs.replace(HELLO, **{"node": f"node{rank}", **differing})
        self.side = OtherNode(meeting, secret, hello, self.file, self.reported.append)

    def __enter__(self) -> "Node":
        self.side.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()

    def refused(self) -> str:
        with contextlib.closing(self.side), pytest.raises(UsageError) as refused:
            self.side.join()
        return str(refused.value)


class Relay:
    """Stands between a node and node 0; `meddle` sees what each sends, and returns what goes on."""

    def __init__(self, to: NodeZeroAddress) -> None:
        self.meddle: Callable[[bytes, bool], bytes] = lambda data, _: data
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.meeting = NodeZeroAddress(host="127.0.0.1", port=self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._to.host, self._to.port))
                self._ends += [near, far]
                for one, other, up in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._carry, args=(one, other, up), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(self.meddle(data, up))
            other.shutdown(socket.SHUT_WR)


def test_files_appear_on_the_other_side_as_they_grow(tmp_path: Path, zero: Zero) -> None:
    zero.write("orders.txt", b"first\n")
    zero.write("master.jsonl", b"not for others\n")
    node = Node(tmp_path, zero.meeting)
    with contextlib.closing(node.side):
        assert node.side.join().job_id == 7
        node.file.write_bytes(b"\xff torn")
        zero.write("orders.txt", bytes(range(256)) * 4096)
        zero.write("step.jsonl", b"step\n")
        eventually(lambda: node.read("step.jsonl") == b"step\n", "the step")
        whole = zero.read("orders.txt")
        eventually(lambda: node.read("orders.txt") == whole, "the orders")
        eventually(lambda: zero.read("node1.jsonl") == b"\xff torn", "the node's own file")
    assert node.read("master.jsonl") == b""


def test_a_node_that_was_cut_off_gets_what_it_missed_and_nothing_twice(
    tmp_path: Path, zero: Zero
) -> None:
    relay = Relay(zero.meeting)
    node = Node(tmp_path, relay.meeting)
    zero.write("orders.txt", b"one\n")
    node.file.write_bytes(b"one\n")
    with contextlib.closing(relay), node:
        eventually(lambda: node.read("orders.txt") == b"one\n", "the first orders")
        eventually(lambda: zero.read("node1.jsonl") == b"one\n", "the first line")
        relay.cut()
        zero.write("orders.txt", b"two\n")
        with node.file.open("ab") as file:
            file.write(b"two\n")
        eventually(lambda: node.read("orders.txt") == b"one\ntwo\n", "the orders")
        eventually(lambda: zero.read("node1.jsonl") == b"one\ntwo\n", "the lines")
    assert [line.partition(" (")[0] for line in node.reported] == [
        f"connection to node0 at {relay.meeting.text} lost",
        f"connected to node0 at {relay.meeting.text} again",
    ]


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("how", ["repeats", "changes", "inserts"])
def test_a_relay_without_the_secret_can_insert_nothing_after_the_handshake(
    tmp_path: Path, zero: Zero, how: str, upwards: bool
) -> None:
    relay = Relay(zero.meeting)
    node = Node(tmp_path, relay.meeting)
    forged = FORGED
    meddled: list[bytes] = []

    def meddle(data: bytes, up: bool) -> bytes:
        if up != upwards or (b"wanted" not in data and b"d2FudGVk" not in data):
            return data
        meddled.append(data)
        return {
            "repeats": data + data,
            "changes": data[:-4] + b"x" + data[-3:],
            "inserts": forged + data,
        }[how]

    with contextlib.closing(relay), node:
        relay.meddle = meddle
        if upwards:
            node.file.write_bytes(b"wanted")
        else:
            zero.write("orders.txt", b"wanted")
        eventually(lambda: bool(meddled), "it has meddled")
        if upwards:
            eventually(lambda: bool(zero.reported), "node 0 has noticed")
        else:
            eventually(lambda: node.side._over.done() or bool(node.reported), "it is noticed")
        relay.meddle = lambda data, _: data
    written = zero.read("node1.jsonl") if upwards else node.read("orders.txt")
    assert written in (b"", b"wanted")


@pytest.mark.parametrize(
    ("differing", "why"),
    [
        ({"secret": b"another one of this length"}, "it has another secret than this node"),
        ({"terms": "slurm-health 2"}, f"second (127.0.0.1) has slurm-health 2; node0: {TERMS}"),
        ({"node": "node0"}, "is node0; the nodes beside first are node[1-2] (NODE_RANK)"),
        ({"node": "node3"}, "is node3; the nodes beside first are node[1-2]"),
        ({"run_id": "r0"}, "node0 was started again since"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_both_sides_say_why(
    tmp_path: Path, zero: Zero, differing: dict[str, Any], why: str
) -> None:
    assert why in Node(tmp_path, zero.meeting, **differing).refused()
    shown = "it has another secret" if "secret" in differing else why
    eventually(lambda: any(shown in line for line in zero.reported), "node 0 says so too")


def test_a_second_node_of_a_rank_is_refused_and_the_first_stays(tmp_path: Path, zero: Zero) -> None:
    first = Node(tmp_path, zero.meeting)
    with first:
        second = Node(tmp_path, zero.meeting, token="another")
        assert "is node1, like second (127.0.0.1)" in second.refused()
        first.file.write_bytes(b"line\n")
        eventually(lambda: zero.read("node1.jsonl") == b"line\n", "the first is mirrored")


def test_a_process_in_the_place_of_one_that_is_gone_goes_on_in_its_file(
    tmp_path: Path, zero: Zero
) -> None:
    first = Node(tmp_path, zero.meeting)
    first.file.write_bytes(b"torn")
    with first:
        eventually(lambda: zero.read("node1.jsonl") == b"torn", "the first is mirrored")
    second = Node(tmp_path, zero.meeting, token="another")
    with second:
        eventually(lambda: second.read("node1.jsonl") == bytes(4), "its file has as many bytes")
        with second.file.open("ab") as file:
            file.write(b"\nline\n")
        eventually(lambda: zero.read("node1.jsonl") == b"torn\nline\n", "the second is mirrored")


STRANGE = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x00" * 64,
    START + FORGED,
    START + MAC + b" " + b"[" * 4000 + b"\n",
    START + b"x" * (1 << 18),
]


@pytest.mark.parametrize("text", STRANGE)
def test_a_stranger_is_sent_away_and_nothing_is_written(
    tmp_path: Path, zero: Zero, text: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", zero.meeting.port), DEADLINE_S) as stranger:
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass
    node = Node(tmp_path, zero.meeting)
    with node:
        assert not node.reported
    assert zero.read("node1.jsonl") == b""


def test_many_strangers_keep_no_node_out(tmp_path: Path, zero: Zero) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            address = ("127.0.0.1", zero.meeting.port)
            stack.enter_context(socket.create_connection(address, DEADLINE_S)).sendall(b"slh")
        stack.enter_context(Node(tmp_path, zero.meeting))
    assert len(zero.reported) < 30


@rows
def test_a_node_writes_nothing_but_the_next_bytes_of_its_own_file(
    tmp_path: Path, zero: Zero, piece: Piece
) -> None:
    async def send() -> None:
        streams = await asyncio.open_connection("127.0.0.1", zero.meeting.port)
        link = Link(streams, b"node", b"node0")
        await link.open(SECRET)
        link.send(HELLO)
        assert isinstance(await link.receive(), Welcome)
        link.send(piece)
        with contextlib.suppress(channel.Cut):
            while True:
                await link.receive(DEADLINE_S)
        link.close()

    asyncio.run(send())
    written = {path.name: path.read_bytes() for path in zero.directory.iterdir()}
    assert set(written.values()) <= {b""}
    assert any("it sent an impossible message" in line for line in zero.reported)


class Impostor:
    """Listens where node 0 should be, and answers everything with the same."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.meeting = NodeZeroAddress(host="127.0.0.1", port=self._listener.getsockname()[1])
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._listener.accept()
                with visitor, contextlib.suppress(OSError):
                    visitor.recv(1 << 16)
                    visitor.sendall(self._answer)


def test_who_poses_as_node_0_without_the_secret_is_not_believed(tmp_path: Path) -> None:
    welcome = msgspec.json.encode(Welcome(run_id="r", job_id=1, directory="/", host="h"))
    with contextlib.closing(Impostor(START + MAC + b" " + welcome + b"\n")) as impostor:
        assert "it has another secret" in Node(tmp_path, impostor.meeting).refused()


@pytest.mark.heavy
def test_a_port_that_another_has_is_named(zero: Zero) -> None:
    with pytest.raises(ChannelError, match="give each run on a machine its own MASTER_PORT"):
        zero.again()


# --- the secret that only the nodes of a run know ------------------------------------------------

ARGUMENTS = Arguments(options=[], program=["train.py"], given={"rdzv_id": "night"})


def test_the_secret_comes_from_the_environment_and_goes_to_no_one_else() -> None:
    environ = {KEY_VARIABLE: "one that is long enough\n", "PATH": "/bin"}
    assert key_of(ARGUMENTS, environ) == b"one that is long enough"
    assert key_of(ARGUMENTS, {}).endswith(b"night")
    assert without_secret(environ) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "short", " " * 40])
def test_what_is_too_short_to_be_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        key_of(ARGUMENTS, {KEY_VARIABLE: text})
