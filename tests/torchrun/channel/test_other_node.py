# SPDX-License-Identifier: Apache-2.0
"""A node that looks for node 0, and finds nothing, or what only looks like it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest

from slurm_health.records.errors import ChannelError, UsageError
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.other_node import NobodyThere, OtherNode
from tests.support.unshared import free_port
from tests.torchrun.channel.test_node_zero import HELLO, SECRET


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
                found, _ = self._listener.accept()
                with found, contextlib.suppress(OSError):
                    found.recv(1 << 16)
                    found.sendall(self._answer)


def hurried(step_s: float) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is looked at."""
    now_s = [0.0]

    def monotonic() -> float:
        now_s[0] += step_s
        return now_s[0]

    return monotonic


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\xff" * 9, b'{"x":' + b"[" * 9000 + b"\n"],
)
def test_what_answers_and_is_no_node_0_is_named(answer: bytes) -> None:
    impostor = Impostor(answer)
    node = OtherNode(impostor.meeting, SECRET, HELLO, lambda _: None, hurried(1.0))
    with pytest.raises(NobodyThere, match="the others may be training already"):
        node.join()
    impostor.close()


def test_who_poses_as_node_0_is_not_believed() -> None:
    challenge = messages.Challenge(nonce="n", secret=True, proof="0" * 64)
    impostor = Impostor(messages.encode(challenge))
    node = OtherNode(impostor.meeting, SECRET, HELLO, lambda _: None)
    with pytest.raises(UsageError, match="it has another secret than this node"):
        node.join()
    impostor.close()


def test_a_port_that_nobody_listens_on_is_named_with_what_to_look_at() -> None:
    nowhere = NodeZeroAddress(host="127.0.0.1", port=free_port())
    said: list[str] = []
    node = OtherNode(nowhere, b"", HELLO, said.append, hurried(20.0))
    with pytest.raises(ChannelError, match="Connection refused; does it run, with NODE_RANK=0"):
        node.join()
    assert said == [f"waiting for node0 at {nowhere.text}: Connection refused"]
