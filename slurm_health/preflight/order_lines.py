# SPDX-License-Identifier: Apache-2.0
"""The lines of `orders.jsonl`: what the master tells its agents, so that each reads only its part.

Each line is a JSON object for all agents, and short however many nodes there are. A line with
`cells` is followed by a table with that many cells of `width` bytes, one for each node in the order
of their names, and by `size` bytes of text. The first table holds the names themselves, so that an
agent finds its number; the others say where in the text a node's part lies. A line and what follows
it are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from slurm_health.records import records
from slurm_health.records.decoding import JsonDecoder
from slurm_health.records.verdict import NodeVerdict

Numbers = list[tuple[int, int]]
"""Nodes by their numbers, as ranges: first and last."""


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", omit_defaults=True):
    """One line; `cells`, `width` and `size` say what follows it."""

    cells: int = 0
    width: int = 0
    size: int = 0

    @property
    def follow_bytes(self) -> int:
        """How long the table and the text are together."""
        return self.cells * self.width + self.size


class Begin(Order, frozen=True, kw_only=True, tag="begin"):
    """The first line: whose orders these are. Its table holds the nodes' names."""

    run_id: str


class BeginRound(Order, frozen=True, kw_only=True, tag="round"):
    """A round, as in `RoundStarted`. A node's part is its group and where that meets."""

    round: int
    deadline_s: float
    phase: str = ""
    probes: list[records.ProbeUsed] = []
    options: dict[str, records.Figure] = {}


class Stop(Order, frozen=True, kw_only=True, tag="stop"):
    """The groups of these nodes are to stop; `timed_out` as in `GroupAborted`."""

    round: int
    nodes: Numbers
    timed_out: bool = False


class Launch(Order, frozen=True, kw_only=True, tag="launch"):
    """Agents are started on these nodes; those of an earlier launch are replaced.

    `light` as in `AgentsLaunched`.
    """

    launch: int
    nodes: Numbers
    light: str = ""


class Stay(Order, frozen=True, kw_only=True, tag="stay"):
    """The master is there, and waits."""


class Leave(Order, frozen=True, kw_only=True, tag="leave"):
    """The run is over."""


class Train(Order, frozen=True, kw_only=True, tag="train"):
    """These nodes go on to train together, none where nobody does.

    A node that does not has the verdict on it as its part.
    """

    nodes: Numbers
    reason: str


AnyOrder = Begin | BeginRound | Stop | Launch | Stay | Leave | Train
_encoder = msgspec.json.Encoder()
_decoder = JsonDecoder[AnyOrder](AnyOrder)
_part_decoder = JsonDecoder[tuple[list[str], records.Rendezvous]](
    tuple[list[str], records.Rendezvous]
)
_verdict_decoder = JsonDecoder[NodeVerdict](NodeVerdict)
_NO_PART = b"-"


def decode(line: bytes) -> AnyOrder:
    """Return the order of a line.

    Raises:
        ValueError: it is none.
    """
    return _decoder.decode(line)  # msgspec's errors are ValueErrors


def beginning(run_id: str, nodes: Sequence[str]) -> bytes:
    """Return the first block of a run's orders."""
    table, width = _table(name.encode() for name in sorted(nodes))
    return _block(Begin(run_id=run_id, cells=len(nodes), width=width), table)


def numbers_of(nodes: Sequence[str]) -> dict[str, int]:
    """Return the number of each node in its run's tables."""
    return {name: number for number, name in enumerate(sorted(nodes))}


def blocks(written: Iterable[records.Record], numbers: Mapping[str, int]) -> bytes:
    """Return what agents are to hear of records of the master's; nothing of most."""
    stopped: dict[tuple[int, bool], list[str]] = {}
    found = b""
    for record in written:
        match record:
            case records.RoundStarted():
                found += _round(record, numbers)
            case records.GroupAborted(round=index, group=group, timed_out=timed_out):
                stopped.setdefault((index, timed_out), []).extend(group)
            case records.AgentsLaunched(launch=launch, nodes=nodes, light=light):
                ranges = _ranges(nodes, numbers)
                found += _block(Launch(launch=launch, nodes=ranges, light=light))
            case records.MasterWaits():
                found += _block(Stay())
            case records.VerdictReached() | records.JobOutcome():
                found += _block(Leave())
            case _:
                pass
    for (index, timed_out), nodes in stopped.items():
        ranges = _ranges(nodes, numbers)
        found += _block(Stop(round=index, nodes=ranges, timed_out=timed_out))
    return found


def training(
    verdict: records.VerdictReached, nodes: Collection[str], reason: str, numbers: Mapping[str, int]
) -> bytes:
    """Return what the processes of `slurm-health run` are to hear: who trains, and why others not.

    Args:
        verdict: of all nodes.
        nodes: those that train; none where nobody does.
        reason: why it is these.
        numbers: of the nodes in the run's tables.
    """
    among = frozenset(nodes)
    parts = [((each.node,), _encoder.encode(each)) for each in verdict.nodes]
    left = [(members, part) for members, part in parts if members[0] not in among]
    return _with_parts(Train(nodes=_ranges(nodes, numbers), reason=reason), left, numbers)


def number_in(cells: int, cell: Callable[[int], bytes], node: str) -> int:
    """Return the number of a node in the first table.

    Args:
        cells: how many there are.
        cell: reads one; few are read.
        node: its name.

    Raises:
        ValueError: it is not there.
    """
    first, last, name = 0, cells, node.encode()
    while first < last:
        middle = (first + last) // 2
        if _stripped(cell(middle)) < name:
            first = middle + 1
        else:
            last = middle
    if first == cells or _stripped(cell(first)) != name:
        raise ValueError(f"{node} is not a node of this run")
    return first


def place_in_text(cell: bytes) -> tuple[int, int] | None:
    """Return where a node's part begins in the text and how long it is, None where it has none.

    Raises:
        ValueError: this is no cell.
    """
    stripped = _stripped(cell)
    if stripped == _NO_PART:
        return None
    start, length = stripped.split(b" ")
    return int(start), int(length)


def round_of(order: BeginRound, part: bytes) -> records.RoundStarted:
    """Return a round with the one group that takes this part.

    Raises:
        ValueError: this is no part.
    """
    group, meeting = _part_decoder.decode(part)
    return records.RoundStarted(
        round=order.round,
        groups=[group],
        rendezvous=[meeting],
        deadline_s=order.deadline_s,
        phase=order.phase,
        probes=order.probes,
        options=order.options,
    )


def verdict_in(part: bytes) -> NodeVerdict | None:
    """Return the verdict on a node that does not train, None where it has no part.

    Raises:
        ValueError: this is no part.
    """
    return _verdict_decoder.decode(part) if part else None


def names(ranges: Numbers, number: int) -> bool:
    """Tell whether a node's number is among these."""
    return any(first <= number <= last for first, last in ranges)


def _round(record: records.RoundStarted, numbers: Mapping[str, int]) -> bytes:
    order = BeginRound(
        round=record.round,
        deadline_s=record.deadline_s,
        phase=record.phase,
        probes=record.probes,
        options=record.options,
    )
    groups = zip(record.groups, record.rendezvous, strict=True)
    parts = [(group, _encoder.encode((group, meeting))) for group, meeting in groups]
    return _with_parts(order, parts, numbers)


def _with_parts(
    order: Order, parts: Iterable[tuple[Sequence[str], bytes]], numbers: Mapping[str, int]
) -> bytes:
    """Return a block in which each of these nodes has its part, which it may share with others."""
    places: list[bytes] = [_NO_PART] * len(numbers)
    text, start = [], 0
    for nodes, part in parts:
        line = part + b"\n"
        text.append(line)
        for node in nodes:
            places[numbers[node]] = b"%d %d" % (start, len(line))
        start += len(line)
    table, width = _table(places)
    head = msgspec.structs.replace(order, cells=len(places), width=width, size=start)
    return _block(head, table, *text)


def _table(cells: Iterable[bytes]) -> tuple[bytes, int]:
    """Return the cells one after another, all of the same width, and that width."""
    contents = list(cells)
    width = max((len(content) for content in contents), default=0) + 1
    return b"".join(content.ljust(width - 1) + b"\n" for content in contents), width


def _block(order: Order, *follow: bytes) -> bytes:
    return b"".join((_encoder.encode(order), b"\n", *follow))


def _stripped(cell: bytes) -> bytes:
    return cell.rstrip(b" \n")


def _ranges(nodes: Iterable[str], numbers: Mapping[str, int]) -> Numbers:
    ranges: Numbers = []
    for number in sorted(numbers[node] for node in nodes):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
