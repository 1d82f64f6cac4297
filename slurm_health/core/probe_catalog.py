# SPDX-License-Identifier: Apache-2.0
"""Which probes there are, who takes part in each, what part of a node they are about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Scope(Enum):
    """Who takes part in a probe together with a worker."""

    SOLO = "solo"  # nobody: the worker alone
    NODE = "node"  # all workers of its node
    RAIL = "rail"  # the workers of the same local rank of all nodes of the group
    PAIR = "pair"  # all workers of all nodes of the group


@dataclass(frozen=True)
class Probe:
    """One kind of measurement. `path` is its file, empty for those that come with slurm-health."""

    name: str
    scope: Scope
    path: str = ""


# In the order in which a round runs them.
BUILT_IN = (
    Probe("values", Scope.SOLO),
    Probe("matmul", Scope.SOLO),
    Probe("memory_copy", Scope.SOLO),
    Probe("node_allgather", Scope.NODE),
    Probe("nic_loopback", Scope.SOLO),
    Probe("rail_allgather", Scope.RAIL),
    Probe("allgather", Scope.PAIR),
    Probe("gpt_fit", Scope.SOLO),
    Probe("gpt", Scope.PAIR),
)
GPT = ("gpt_fit", "gpt")
_COMPONENTS = {
    "values": "compute",
    "matmul": "compute",
    "memory_copy": "memory",
    "node_allgather": "links",
    "nic_loopback": "nic",
    "rail_allgather": "network",
    "allgather": "network",
    "gpt_fit": "memory",
}


def component_of(metric: str) -> str:
    """Return the part of a node that a metric is about; an own probe is its own part."""
    probe, _, quantity = metric.partition(" ")
    if probe == "gpt":
        return "compute" if "compute" in quantity else "network"
    return _COMPONENTS.get(probe, probe)


_QUICK = ("matmul", "allgather")
_STANDARD = ("values", "memory_copy", "node_allgather", "rail_allgather", *_QUICK)
SETS = {
    "quick": _QUICK,
    "standard": _STANDARD,
    "thorough": (*_STANDARD, "nic_loopback", *GPT),
    "network-check": ("matmul", "rail_allgather", "allgather"),
    "straggler-detection": GPT,
}
DEFAULT = "standard"
