# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a check say to each other, one JSON object a line. Pure.

A node says hello, node 0 answers with a challenge, the node with its proof, and is welcomed or
refused. Each proves with the secret that it has seen the other's nonce, so that nothing recorded
proves anything later. Behind the welcome a node sends lines of its journal, and node 0 records.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from slurm_health.records.decoding import JsonDecoder

PROTOCOL = 1
# A name or a number is all that a line holds before its sender has proven anything.
MOST_UNPROVEN_BYTES = 4096
# One that holds a record with samples of a node with many devices has some 100 kB.
MOST_BYTES = 8 << 20
# Lines of a journal that are sent at once.
LINES_BYTES = 1 << 18
# Each end says that it is there so often, and takes the other for unreachable after so long.
ALIVE_S = 10.0
SILENT_S = 45.0
# From the first byte to the welcome.
HANDSHAKE_S = 10.0
# What a last word is given to arrive.
LINGER_S = 1.0


class ChannelMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="say"):
    """One line."""


class Hello(ChannelMessage, frozen=True, kw_only=True, tag="hello"):
    """A node wants to take part; `rank` is its place among the nodes of this check.

    `token` is this process's own, so that it is known when it comes again; `run_id` then names the
    run that it takes part in, and `heard` counts the records it has. The rest must be the same on
    all nodes.
    """

    protocol: int
    nonce: str
    slurm_health: str
    rank: int
    host: str
    nnodes: str
    check: str
    rdzv_id: str
    token: str
    run_id: str = ""
    heard: int = 0


class Challenge(ChannelMessage, frozen=True, kw_only=True, tag="challenge"):
    """Node 0's nonce, its proof, and whether it has a secret."""

    nonce: str
    secret: bool
    proof: str


class Proof(ChannelMessage, frozen=True, kw_only=True, tag="proof"):
    """The node's answer."""

    proof: str


class Welcome(ChannelMessage, frozen=True, kw_only=True, tag="welcome"):
    """The node takes part. `have_bytes` of its file are at node 0, in `directory` on `host`."""

    run_id: str
    job_id: int
    directory: str
    host: str
    have_bytes: int


class NodeRefused(ChannelMessage, frozen=True, kw_only=True, tag="refused"):
    """The node does not take part, and why."""

    why: str


class MasterLine(ChannelMessage, frozen=True, kw_only=True, tag="told"):
    """A record of the master's, as a line of a journal; they are numbered from 0 for each node."""

    number: int
    line: str


class Heard(ChannelMessage, frozen=True, kw_only=True, tag="heard"):
    """How many records the node has."""

    count: int


class Lines(ChannelMessage, frozen=True, kw_only=True, tag="lines"):
    """Whole lines of a node's file, read as Latin-1, and how many bytes stand before them."""

    at_bytes: int
    text: str


class Alive(ChannelMessage, frozen=True, kw_only=True, tag="alive"):
    """This end is there."""


class Leaving(ChannelMessage, frozen=True, kw_only=True, tag="leaving"):
    """The node ends; `for_all` is set where a person has ended it, and with it the run."""

    why: str
    for_all: bool


class Ended(ChannelMessage, frozen=True, kw_only=True, tag="ended"):
    """The run is over for all, without an outcome; `unchecked` where node 0 may train anyway."""

    why: str
    unchecked: bool = False


ToNodeZero = Hello | Proof | Heard | Lines | Alive | Leaving
ToNode = Challenge | Welcome | NodeRefused | MasterLine | Alive | Ended
_encoder = msgspec.json.Encoder()
_to_node_zero = JsonDecoder[ToNodeZero](ToNodeZero)
_to_node = JsonDecoder[ToNode](ToNode)


def encode(message: ChannelMessage) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def at_node_zero(line: bytes) -> ToNodeZero:
    """Return what a node says.

    Raises:
        ValueError: it is no such message.
    """
    return _to_node_zero.decode(line)


def at_node(line: bytes) -> ToNode:
    """Return what node 0 says.

    Raises:
        ValueError: it is no such message.
    """
    return _to_node.decode(line)


def proof(secret: bytes, role: str, hello: Hello, nonce: str) -> str:
    """Return what proves that an end knows the secret; `nonce` is node 0's, `role` the prover's."""
    said = hashlib.sha256(encode(hello)).hexdigest()
    text = "\0".join(("slurm-health run", role, hello.nonce, nonce, said))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def proves(given: str, expected: str) -> bool:
    """Compare proofs, in the same time whatever they are."""
    return hmac.compare_digest(given.encode(), expected.encode())
