# SPDX-License-Identifier: Apache-2.0
"""What a probe is given, and what it gives back.

A probe is one file with one function, `measure(context) -> list[Sample]`. It may use the standard
library, this module, and torch or, as a light one, numpy. Raising is its other way to answer:
NodeFault for a measured fault of this node, WrongPayload for data that arrived changed, NotMeasured
for everything that is not the node's fault; any other exception counts as a crash of the probe.

Probes of ours are written once, over two protocols: a `Device` makes arrays and computes with them,
a `Group` exchanges them. Each has two backends: torch (`torch_device`, `torch_group`), and numpy
with TCP (`light`). An array is whatever the backend of its device calls one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Union

Figure = Union[int, float, str]  # noqa: UP007 - read when it is run, by older Pythons too


class NodeFault(Exception):
    """This node was measured and is at fault; the text says what was found, on which device."""


class WrongResults(NodeFault):
    """A device gave another result than the only correct one: proof, even if it happens once."""


class NotMeasured(Exception):
    """Nothing could be measured, and that says nothing about the node; the text says why."""


class WrongPayload(Exception):
    """Data arrived changed; the text says whose and where. Either end, or the way, is at fault."""


class Unusable(Exception):
    """A device, or the driver, did not do what it does elsewhere; the text is in its own words.

    What may be the job's doing is no such thing: a torch for other devices, memory that is in use,
    a count of devices that is not Slurm's.
    """


class Unreachable(Exception):
    """The place where a group meets does not answer: its host, this one or the way is at fault."""


# Named tuples: to load dataclasses takes a light worker a fifth of the time until it is ready.


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


class Watch(Protocol):
    """Times windows of work on a device."""

    def begin(self) -> None:
        """Start a window."""

    def end(self, iterations: int) -> None:
        """End a window with so many iterations."""

    def sample(self) -> Sample:
        """Return the milliseconds of each window per iteration."""


class Product(Protocol):
    """A product of two square matrices, as many at once as the device has threads of its own."""

    def multiply(self, times: int = 1) -> None:
        """Multiply so often."""

    def wrong(self) -> int:
        """Return how many values of the last result are not exact. Only where they are known."""

    def values(self) -> int:
        """Return how many values one multiplication calculates."""


class Device(Protocol):
    """Where a worker computes. `raw` is what its library calls it; a worker has one device."""

    raw: Any
    on_cuda: bool
    torch: str  # the version of torch, empty where there is none
    name: str  # in a sentence: `device 3`, or `the processors`

    def facts(self) -> dict[str, Any]:
        """Return what the event `ready` says of a worker with it."""

    def product(self, size: int, *, exact: bool) -> Product:
        """Make two matrices: of integers, whose product is known, or of random numbers."""

    def memory(self) -> Iterator[str]:
        """Yield each memory that is tested by itself, while arrays are made there: its name."""

    def words(self, size_bytes: int) -> Any:
        """Return an array of 64-bit integers that holds nothing yet."""

    def fill(self, words: Any, value: int) -> Any:
        """Write one integer to each word; return the array."""

    def number(self, words: Any, first: int, step: int) -> Any:
        """Write `first` to the first word, and to each one `step` more; return the array."""

    def payload(self, size_bytes: int, rank: int) -> Any:
        """Return what a rank sends: no two words are alike, and every rank knows that of others."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array; it need not be waited for."""

    def difference(self, words: Any, expected: Any) -> tuple[int, int, int]:
        """Return how many words differ from others, or a value; the first one's place, and it."""

    def watch(self) -> Watch:
        """Return what times this device."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    def free_bytes(self) -> int:
        """Return how much of its memory is free; 0 where that is not known."""

    def is_out_of_memory(self, err: BaseException) -> bool:
        """Tell an error that says there is no memory from all others."""

    def users(self) -> str:
        """Return which other processes use it, as ` (used by ...)`, empty where none is known."""


class Group(Protocol):
    """The group that a worker is in during a round, at most one at a time.

    All that waits in it looks whether the agent has said to stop. `connecting` are the members that
    its library is connecting at the moment: some of this node by local rank, or all by rank.
    """

    connecting: list[int]
    handle: Any  # what a site's own probe is given of it

    def join(self, place: Mapping[str, Any], scope: str) -> None:
        """Come together with all members of the group of a scope, and exchange something.

        Raises:
            Unreachable: the place where they meet does not answer.
        """

    def join_rail(self) -> None:
        """Go on with the members of this worker's local rank alone."""

    def join_all(self) -> None:
        """Go on with all members after that."""

    def meet(self) -> None:
        """Return once every member of the whole group has called this as often."""

    def all_gather(self, whole: Any, mine: Any) -> None:
        """Fill the parts of all other ranks in an array of all; it need not be waited for."""

    def most(self, value: float) -> float:
        """Return the largest value of all ranks, the same on all of them."""

    def figures(self) -> dict[str, Figure]:
        """Return what else there is to tell of its connections, `transport` among it."""

    def leave(self) -> None:
        """Leave it, with all its members, if there is one."""

    def leave_broken(self) -> bool:
        """Leave one of which a member may be missing; tell whether this worker is still good."""

    def interrupt(self) -> None:
        """End whatever the main thread waits for in it without looking; from another thread."""


class ProbeContext(NamedTuple):
    """One worker of one device, and its rank in the group that the probe's scope gives it.

    A probe of scope "solo" has no group. For the others `group` is what the functions of
    `torch.distributed` take as theirs (None: the default process group): all workers of this node
    ("node"), the workers of the same local rank of all nodes of the group ("rail"), or all workers
    of all its nodes ("pair"); for a light probe it is a `light.LightGroup`. `meet` waits until all
    workers of all these nodes have called it: all rails, where each is a group. `options` are the
    round's, the same for all its members. `device` is torch's, `compute` and `peers` are ours.
    """

    compute: Device
    local_rank: int = 0
    local_size: int = 1
    rank: int = 0
    world_size: int = 1
    options: Mapping[str, Figure] = MappingProxyType({})
    group: Any = None
    meet: Callable[[], None] = lambda: None
    peers: Any = None  # a Group, where world_size is more than 1

    @property
    def device(self) -> Any:
        """The device as torch knows it, or `cpu`."""
        return self.compute.raw

    @property
    def on_cuda(self) -> bool:
        """Whether the device is an accelerator that torch drives through its CUDA interface."""
        return self.compute.on_cuda

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self.compute.synchronize()

    def size(self, option: str, on_cpus: int) -> int:
        """Return how large or how often something is: an accelerator's by the round's options."""
        if not self.on_cuda:
            return on_cpus
        from slurm_health.preflight.probes.sizes import FULL  # what no light worker needs

        return int(self.options.get(option, getattr(FULL, option)))
