# SPDX-License-Identifier: Apache-2.0
"""The causes that are injected, and what a report must say of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

NOTHING = "nothing"


class Ends(Enum):
    """What becomes of a training, and so what is waited for."""

    HANGS = "hangs"
    STOPS = "stops"  # for good: it would fail again
    FAILS = "fails"  # and what follows is not looked at
    GOES_ON = "goes on"  # it is started again by itself
    SLOWS = "slows"
    RUNS = "runs"  # nothing is wrong


class Where(Enum):
    """On which nodes a report must show it."""

    NODE = "the node"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause.

    Args:
        name: on the command line and in the table.
        title: what is done.
        named: what a report may call it; the first is what it is called most of the time.
        ends: what becomes of the training.
        where: on which nodes it must be shown.
        of_the_node: the node is to blame, so that accusing it accuses no healthy one.
        outside: done to the node by the benchmark, where the script does the others to itself.
        spares_first_node: it cannot be done to the node that the script itself runs on.
    """

    name: str
    title: str
    named: tuple[str, ...]
    ends: Ends
    where: Where = Where.NODE
    of_the_node: bool = False
    outside: bool = False
    spares_first_node: bool = False


CAUSES = (
    Cause(
        name="stopped",
        title="a rank is stopped (SIGSTOP)",
        named=("rank-stopped",),
        ends=Ends.HANGS,
    ),
    Cause(
        name="mismatch",
        title="a rank calls another collective",
        named=("mismatched-collective",),
        ends=Ends.HANGS,
    ),
    Cause(
        name="behind",
        title="a rank is a step behind: its data ends later than that of the others",
        named=("rank-out-of-step",),
        ends=Ends.HANGS,
    ),
    Cause(
        name="drop",
        title="all packets between a node and the others are dropped",
        named=("network-of-group",),
        ends=Ends.HANGS,
        of_the_node=True,
        outside=True,
    ),
    Cause(
        name="mount",
        title="a data loader reads from a mount that hangs (FUSE)",
        named=("data-loader-stuck",),
        ends=Ends.HANGS,
        of_the_node=True,
        outside=True,
    ),
    Cause(
        name="killed",
        title="a rank is killed (SIGKILL)",
        named=("killed",),
        ends=Ends.GOES_ON,
    ),
    Cause(
        name="memory",
        title="a rank is out of memory",
        named=("host-out-of-memory", "killed-for-memory"),
        ends=Ends.STOPS,
    ),
    Cause(
        name="disk",
        title="the disk for checkpoints is full on a node",
        named=("disk-full",),
        ends=Ends.FAILS,
        of_the_node=True,
        outside=True,
    ),
    Cause(
        name="slurmd",
        title="a node's slurmd is killed",
        named=("node-lost",),
        ends=Ends.GOES_ON,
        of_the_node=True,
        outside=True,
        spares_first_node=True,
    ),
    Cause(
        name="lost",
        title="a node is lost: no packet passes",
        named=("node-lost",),
        ends=Ends.GOES_ON,
        of_the_node=True,
        outside=True,
        spares_first_node=True,
    ),
    Cause(
        name="shape",
        title="a batch of the wrong shape on a rank",
        named=("wrong-shape",),
        ends=Ends.STOPS,
    ),
    Cause(
        name="nan",
        title="the assertion that the loss is a number fails on all ranks",
        named=("not-a-number",),
        ends=Ends.STOPS,
        where=Where.ALL,
    ),
    Cause(
        name="loader",
        title="the data loader of a rank is slow",
        named=("slow-data-loader",),
        ends=Ends.SLOWS,
    ),
    Cause(
        name="starved",
        title="a node has a twenty-fifth of a core",
        named=("no-processor",),
        ends=Ends.SLOWS,
        of_the_node=True,
        outside=True,
    ),
    Cause(
        name="link",
        title="the network link of a node is throttled",
        named=("slow-network",),
        ends=Ends.SLOWS,
        of_the_node=True,
        outside=True,
    ),
    Cause(
        name="healthy",
        title="nothing: uneven steps and checkpoints",
        named=(NOTHING,),
        ends=Ends.RUNS,
        where=Where.NONE,
    ),
)
BY_NAME = {cause.name: cause for cause in CAUSES}
