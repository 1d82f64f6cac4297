# SPDX-License-Identifier: Apache-2.0
"""The transport of reports from agents to the watch.

srun forwards the output of tasks in pieces of 1024 bytes, mixed between tasks. So a message travels
in short lines with its node, its number, and their places in it.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from slurm_health.records.decoding import JsonDecoder
from slurm_health.training.diagnosis.samples import NodeReport

T = TypeVar("T")

# Lines of the watch: it is alive; inspect the ranks; send the state of the node; `reach n1,n2
# ADDRESS...`: these nodes are to try to connect to these addresses.
HERE, INSPECT, STATE, REACH = b".", b"inspect", b"state", b"reach"
REPORTS = JsonDecoder[NodeReport](NodeReport)
_LINE = re.compile(rb"(\S{1,255}) (\d{1,9}) (\d{1,6})/(\d{1,6}) ([A-Za-z0-9+/=]*)")
_PART_BYTES = 640  # beside the longest name of a node
_MOST_BYTES = 64 << 20


class HasNode(Protocol):
    """A message of a node, with its name."""

    @property
    def node(self) -> str:
        """The name of the node."""


def lines_of(message: HasNode, number: int) -> Iterator[bytes]:
    """Yield the lines of a message; `number` counts the messages of its node."""
    data = base64.b64encode(zlib.compress(msgspec.json.encode(message)))
    parts = [data[at : at + _PART_BYTES] for at in range(0, len(data), _PART_BYTES)]
    for place, part in enumerate(parts, start=1):
        yield b"%s %d %d/%d %s\n" % (message.node.encode(), number, place, len(parts), part)


class MessageReader(Generic[T]):
    """Joins the lines of messages; those of a node's older message are dropped."""

    def __init__(self, decoder: JsonDecoder[T]) -> None:
        self._decoder = decoder
        self._parts: dict[bytes, tuple[bytes, dict[int, bytes]]] = {}

    def take(self, line: bytes) -> T | None:
        """Add a line; return the message that it completes."""
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
                base64.b64decode(b"".join(parts[place] for place in sorted(parts))), _MOST_BYTES
            )
            return self._decoder.decode(data)
        except (binascii.Error, zlib.error, msgspec.MsgspecError):
            return None
