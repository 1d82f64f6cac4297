# SPDX-License-Identifier: Apache-2.0
"""What the monitors of nodes tell the watch on the batch host, as lines that stay whole.

srun passes on what tasks write in pieces of 1024 bytes, those of several tasks as they come. So a
message travels in short lines, each with its node, its number, and its place among them.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from slurm_health.records.decoding import JsonDecoder
from slurm_health.training.diagnosis.rank_now import RankLook, RankNow
from slurm_health.training.diagnosis.seen import paths_by_node
from slurm_health.training.diagnosis.watched import Looked

T = TypeVar("T")

# What the watch says, a line each: that it is there; tell how the ranks are; look at all there is.
HERE, NOW, LOOK = b".", b"now", b"look"


class NodeNow(msgspec.Struct, frozen=True, tag="now"):
    """All ranks of a node that have a heartbeat."""

    node: str
    ranks: tuple[RankNow, ...] = ()


class NodeLook(msgspec.Struct, frozen=True, tag="look"):
    """All that can be seen of a node's ranks, and the TCP connections that do not get through.

    `now` is how the ranks were when they had answered. `addresses` are this node's own; `broken`
    has the address at the other end of a connection, and how often was sent again. `not_seen` says
    what could not be looked at on this node, and why. `sent` is what was sent to each address so
    far, in bytes, and the seconds that it took; `received` all bytes that came.
    """

    node: str
    ranks: tuple[RankLook, ...] = ()
    now: tuple[RankNow, ...] = ()
    addresses: tuple[str, ...] = ()
    broken: tuple[tuple[str, int], ...] = ()
    not_seen: dict[str, str] = {}
    sent: dict[str, tuple[int, float]] = {}
    received: int = 0


NodeMessage = NodeNow | NodeLook
MESSAGES = JsonDecoder[NodeNow | NodeLook](NodeNow | NodeLook)
_LINE = re.compile(rb"(\S{1,255}) (\d{1,9}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")
_PART_BYTES = 640  # beside the longest name of a node
_MOST_BYTES = 64 << 20


class OfNode(Protocol):
    """What a node tells, with its name."""

    @property
    def node(self) -> str:
        """The name of the node."""


def lines_of(message: OfNode, number: int) -> Iterator[bytes]:
    """Yield the lines of a message; `number` counts the messages of its node."""
    data = base64.b64encode(zlib.compress(msgspec.json.encode(message)))
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    for place, part in enumerate(parts, start=1):
        yield b"%s %d %d/%d %s\n" % (message.node.encode(), number, place, len(parts), part)


def looked_at(looks: Mapping[str, NodeLook], *, silent: Sequence[str]) -> Looked:
    """Return what was seen of all nodes; `silent` are those that told nothing."""
    addresses = {address: node for node, each in looks.items() for address in each.addresses}
    return Looked(
        before={(now.program, now.rank): now for each in looks.values() for now in each.now},
        looks={(look.program, look.rank): look for each in looks.values() for look in each.ranks},
        paths=paths_by_node({node: each.broken for node, each in looks.items()}, addresses),
        silent=tuple(silent),
        not_seen={what: why for each in looks.values() for what, why in each.not_seen.items()},
        received={node: each.received for node, each in looks.items()},
    )


class MessageReader(Generic[T]):
    """Puts messages together again. Of each node, what belongs to an older message is dropped."""

    def __init__(self, decoder: JsonDecoder[T]) -> None:
        self._decoder = decoder
        self._parts: dict[bytes, tuple[bytes, dict[int, bytes]]] = {}

    def take(self, line: bytes) -> T | None:
        """Take in a line; return the message that it makes whole."""
        match = _LINE.fullmatch(line)
        if match is None:  # srun's own, or torn
            return None
        node, number, place, of_how_many, part = match.groups()
        begun, parts = self._parts.get(node, (b"", {}))
        if begun != number:
            parts = {}
        parts[int(place)] = part
        self._parts[node] = (number, parts)
        if len(parts) < int(of_how_many):
            return None
        del self._parts[node]
        try:
            data = zlib.decompressobj().decompress(
                base64.b64decode(b"".join(parts[each] for each in sorted(parts))), _MOST_BYTES
            )
            return self._decoder.decode(data)
        except (binascii.Error, zlib.error, msgspec.MsgspecError):
            return None
