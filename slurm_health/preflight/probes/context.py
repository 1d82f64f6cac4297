# SPDX-License-Identifier: Apache-2.0
"""What a probe is given, and what it gives back.

A probe is one file with one function, `measure(context) -> list[Sample]`. It may use the standard
library, this module, and torch or, as a light one, numpy. Raising is its other way to answer:
NodeFault for a measured fault of this node, WrongPayload for data that arrived changed, NotMeasured
for everything that is not the node's fault; any other exception counts as a crash of the probe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

if TYPE_CHECKING:
    import torch

Figure = Union[int, float, str]  # noqa: UP007 - read when it is run, by older Pythons too


class NodeFault(Exception):
    """This node was measured and is at fault; the text says what was found, on which device."""


class WrongResults(NodeFault):
    """A device gave another result than the only correct one: proof, even if it happens once."""


class NotMeasured(Exception):
    """Nothing could be measured, and that says nothing about the node; the text says why."""


class WrongPayload(Exception):
    """Data arrived changed; the text says whose and where. Either end, or the way, is at fault."""

    @classmethod
    def of(cls, rank: int, world_size: int, senders: Sequence[int]) -> WrongPayload:
        """Return what a rank says that has other data than these ranks sent."""
        wrong = ", ".join(map(str, senders))
        return cls(
            f"rank {rank} of {world_size} received other data than rank {wrong} sent:"
            f" {len(senders)} of {world_size} checksums of an all-gather differ"
        )


class Unusable(Exception):
    """A device, or the driver, did not do what it does elsewhere; the text is in its own words.

    What may be the job's doing is no such thing: a torch for other devices, memory that is in use,
    a count of devices that is not Slurm's.
    """


def _nobody_else() -> None:
    """Wait for nobody."""


# Named tuples: to load dataclasses takes a light worker a fifth of the time until it is ready.


class ProbeContext(NamedTuple):
    """One worker of one device, and its rank in the group that the probe's scope gives it.

    A probe of scope "solo" has no group. For the others `group` is what the functions of
    `torch.distributed` take as theirs (None: the default process group): all workers of this node
    ("node"), the workers of the same local rank of all nodes of the group ("rail"), or all workers
    of all its nodes ("pair"); for a light probe it is the `Ring` of these. `meet` waits until all
    workers of all these nodes have called it: all rails, where each is a group. `options` are the
    round's, the same for all its members.
    """

    device: torch.device | Any
    local_rank: int = 0
    local_size: int = 1
    rank: int = 0
    world_size: int = 1
    options: Mapping[str, Figure] = MappingProxyType({})
    group: Any = None
    meet: Callable[[], None] = _nobody_else

    @property
    def on_cuda(self) -> bool:
        """Whether the device is an accelerator that torch drives through its CUDA interface."""
        return bool(self.device.type == "cuda")

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def slowest_ms(self, elapsed_ms: float) -> float:
        """Return the longest of the ranks' times, the same on all of them, and never 0."""
        import torch
        import torch.distributed as dist

        slowest = torch.tensor([max(elapsed_ms, 1e-3)], device=self.device)
        if self.world_size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        return float(slowest.item())


class Sample(NamedTuple):
    """One quantity, timed several times on this worker.

    `taken_ms` is how much of each time others had the processors, empty where that is little or
    not known. `quantity` tells several quantities of one probe apart and is empty where there is
    only one. `shared` is set when the time is that of the whole group and not of this worker alone;
    where a node of the group does not give it, the group has none. `flop` is the work of one
    iteration, `total_bytes` what it moves: over all ranks for a collective. `figures` is for what
    is not a time.
    """

    iteration_ms: Sequence[float] = ()
    taken_ms: Sequence[float] = ()
    quantity: str = ""
    shared: bool = False
    flop: float = 0.0
    total_bytes: int = 0
    figures: Mapping[str, Figure] = MappingProxyType({})
