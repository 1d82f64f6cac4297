# SPDX-License-Identifier: Apache-2.0
"""The probes: their scopes, and what they measure of which component of a node."""

from __future__ import annotations

from enum import Enum

import msgspec


class Scope(Enum):
    """The workers that take part in a probe."""

    SOLO = "solo"  # one worker alone
    NODE = "node"  # all workers of its node
    RAIL = "rail"  # the workers of the same local rank of all nodes of the group
    PAIR = "pair"  # all workers of all nodes of the group


class Probe(msgspec.Struct, frozen=True):
    """One kind of measurement. `path` is its file, empty for those that come with slurm-health."""

    name: str
    scope: Scope
    path: str = ""


# In the order in which a round runs them.
BUILT_IN = (
    Probe("values", Scope.SOLO),
    Probe("matmul", Scope.SOLO),
    Probe("memory_copy", Scope.SOLO),
    Probe("memory_pattern", Scope.SOLO),
    Probe("host_copy", Scope.SOLO),
    Probe("node_allgather", Scope.NODE),
    Probe("peer_copy", Scope.NODE),
    Probe("rail_allgather", Scope.RAIL),
    Probe("allgather", Scope.PAIR),
    Probe("gpt_fit", Scope.SOLO),
    Probe("gpt", Scope.PAIR),
)
GPT = ("gpt_fit", "gpt")
# No probe of a round: agents test it beside them, so that no filesystem that hangs holds a worker.
STORAGE = "storage"
# Options of the round that orders the test: paths, separated by commas, and the nodes.
STORAGE_PATHS, STORAGE_NODES = "storage_paths", "storage_nodes"
# How long the test of a path takes at most. A healthy one takes tens of milliseconds.
STORAGE_LIMIT_S = 6.0
# A node begins so much later than the one before it: a metadata server answers some ten thousand
# requests a second, and a node sends about twenty.
STORAGE_STAGGER_S = 0.001
# What became of files, `status` of a test or of a read: one of these, or the name of an error.
OK = "ok"
HUNG = "hung"
UNSEEN = "unseen"  # the files of a peer never appeared
LATE = "late"  # the peer had not written them yet, which says nothing about the reader
FULL = frozenset({"ENOSPC", "EDQUOT"})
REFUSED = frozenset({"EACCES", "EPERM"})
# Only for accelerators, or only for nodes with accelerators.
ON_ACCELERATORS = frozenset({"memory_pattern", "host_copy", "peer_copy"})
# Light probes measure the same as these with numpy and over TCP, without torch.
LIGHT = frozenset(
    {
        "values",
        "matmul",
        "memory_copy",
        "memory_pattern",
        "node_allgather",
        "rail_allgather",
        "allgather",
    }
)
# Backends of workers on CPUs: with torch, and light.
TORCH_ON_CPUS, LIGHT_ON_CPUS = "gloo", "tcp"
ON_CPUS = frozenset({TORCH_ON_CPUS, LIGHT_ON_CPUS})
_COMPONENTS = {
    "values": "compute",
    "matmul": "compute",
    "memory_copy": "memory",
    "memory_pattern": "memory",
    "host_copy": "links",
    "peer_copy": "links",
    "node_allgather": "links",
    "rail_allgather": "network",
    "allgather": "network",
    "gpt_fit": "memory",
}


# Reported as a rate. All other times are reported in ms.
ALLGATHER, MATMUL = "allgather", "matmul"
ALLGATHERS = frozenset({ALLGATHER, "rail_allgather", "node_allgather"})
COPIES = frozenset({"memory_copy", "host_copy", "peer_copy"})


def unit_of(probe: str) -> str:
    """Return the unit of a probe's measurements; a quantity may follow its name."""
    name = probe.partition(" ")[0]
    if name == MATMUL:
        return "GFLOP/s"
    return "GB/s" if name in ALLGATHERS or name in COPIES else "ms"


class Metric(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The subject of a time: a probe, its quantity, the model and the part of a node.

    A field is empty if a probe has one of it, or does not distinguish it. Only times of one metric
    are ever compared. The text is the same in every output.
    """

    probe: str
    quantity: str = ""
    model: str = ""
    part: str = ""

    def __str__(self) -> str:
        """Return the name: `gpt step`, `matmul:device 3`, `matmul on NVIDIA H200`."""
        quantity = f" {self.quantity}" if self.quantity else ""
        model = f" on {self.model}" if self.model else ""
        part = f":{self.part}" if self.part else ""
        return f"{self.probe}{quantity}{model}{part}"

    @property
    def component(self) -> str:
        """The component that it measures; a user's own probe is a component of its own."""
        if self.probe == "gpt":
            return "compute" if "compute" in self.quantity else "network"
        return _COMPONENTS.get(self.probe, self.probe)


_QUICK = ("matmul", "allgather")
_STANDARD = ("values", "memory_copy", STORAGE, "node_allgather", "rail_allgather", *_QUICK)
LIGHT_SET, AUTO = "light", "auto"
SETS = {
    AUTO: _STANDARD,
    LIGHT_SET: (*_STANDARD, "memory_pattern"),
    "quick": _QUICK,
    "standard": _STANDARD,
    "thorough": (*_STANDARD, "host_copy", "peer_copy", "memory_pattern", *GPT),
    "network-check": ("matmul", "rail_allgather", "allgather"),
    "straggler-detection": GPT,
    STORAGE: ("values", STORAGE),  # a node whose workers measured nothing is undecided
}
DEFAULT = AUTO
