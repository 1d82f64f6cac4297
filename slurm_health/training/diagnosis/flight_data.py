# SPDX-License-Identifier: Apache-2.0
"""What a rank's Flight Recorder, or NCCL's watchdog, tells of its collectives."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# What PyTorch says that a group is for, where the script has not said it.
NO_PURPOSE = {None, "", "default_pg", "undefined"}
_OVER = {"completed", "retired"}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective as a rank's Flight Recorder has it; `sequence` counts within its group."""

    group: str
    sequence: int
    what: str
    sizes: str = ""
    state: str = ""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A send to rank `peer`, or a receive from it; not `certain` where it may be over."""

    peer: int
    sends: bool
    certain: bool = True


class Reached(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank came in one group: -1 where none is known.

    Works are numbered within their group. `entered` is the last one that the rank called, `over`
    the last one that its device has left, `inside` those between that are not over: first, last.
    """

    entered: int = -1
    over: int = -1
    inside: tuple[int, int] | None = None


class FlightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The latest collectives of one rank, oldest first.

    `members` has all ranks of each process group that it knows, whether they left a record or not,
    `reached` how far it came in each group, also where `operations` had to leave some out.
    `transfers` are not over, `exchanged` are those of which an entry says that they were.
    `whole`: no older entry was overwritten, so that a group without one was not used; without any,
    a record that is not whole is that of a dump that could not be read. `unclaimed`: it was found
    where all trainings of the user leave theirs.
    """

    rank: int
    operations: tuple[Operation, ...] = ()
    members: dict[str, tuple[int, ...]] = {}
    reached: dict[str, Reached] = {}
    transfers: tuple[Transfer, ...] = ()
    exchanged: tuple[Transfer, ...] = ()
    whole: bool = True
    unclaimed: bool = False


def is_over(operation: Operation) -> bool:
    """Tell whether the device has left a collective."""
    return operation.state in _OVER


def reached_of(operations: Iterable[Operation]) -> dict[str, Reached]:
    """Return how far a rank came in each group, by its entries there, oldest first."""
    reached: dict[str, Reached] = {}
    for each in operations:
        before = reached.get(each.group, Reached())
        first = before.inside[0] if before.inside else each.sequence
        reached[each.group] = Reached(
            entered=max(before.entered, each.sequence),
            over=max(before.over, each.sequence if is_over(each) else first - 1),
            inside=before.inside if is_over(each) else (first, each.sequence),
        )
    return reached
