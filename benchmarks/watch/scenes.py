# SPDX-License-Identifier: Apache-2.0
"""The scenes: kinds of jobs, ways to hang, and what a report must say of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

JOBS = {
    "ddp": "DDP over gloo, by srun",
    "fsdp": "FSDP in two pipeline stages over gloo, by srun",
    "mpi": "Open MPI by mpirun, without torch",
    "sockets": "sockets alone, by srun",
    "tasks": "DDP over gloo, by srun, two tasks on a node",
    "torchrun": "DDP over gloo, by torchrun, two ranks on a node",
    "container": "DDP in user and pid namespaces, half of them without the job's environment",
}
HANGS = {
    "stopped": "a rank is stopped",
    "worker": "the process that loads a rank's data has died",
    "skipped": "a rank is in another collective",
    "link": "the packets of a node are dropped",
    "filesystem": "a rank reads from a filesystem that hangs",
    "rendezvous": "a rank, or a node's torchrun, has another port: the rendezvous never forms",
}
# mpirun starts its ranks together. A container does not see what its node mounts later. Ranks that
# wait for each other by sockets alone have no collectives, and look like a service without
# requests: nothing is said of these for 15 minutes.
LEFT_OUT = {
    *(("mpi", "rendezvous"), ("container", "filesystem")),
    *(("sockets", how) for how in ("skipped", "worker", "rendezvous")),
}
HEALTHY = (
    *("compile", "checkpoint", "evaluation", "notebook", "service"),
    *("idle", "accumulating", "debugger", "data", "elastic"),
)
CONTROL = "control"  # one whose rank is stopped for a while: the same watch must report it
OUTSIDE = {"link", "filesystem"}  # done to a node by the benchmark
_CAUSES = {
    "stopped": {"rank-stopped"},
    "worker": {"rank-elsewhere", "data-loader-stuck"},
    "skipped": {"collectives-differ", "rank-out-of-step", "mismatched-collective"},
    "link": {"network-of-group", "node-silent"},
    "filesystem": {"file-awaited", "rank-elsewhere", "data-loader-stuck"},
    "rendezvous": {"rendezvous-never-formed"},
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run: a kind of job that hangs, or a healthy one (no `how`)."""

    kind: str
    how: str = ""
    number: int = 0

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return 4 if self.kind == "fsdp" else 3

    @property
    def on_node(self) -> int:
        """How many ranks a node has."""
        return 2 if self.kind in {"tasks", "torchrun"} else 1

    @property
    def culprit(self) -> int:
        """The rank that the others wait for: never of the first node, which has the rendezvous."""
        return self.on_node + self.number % (self.on_node * (self.nodes - 1))

    def truth(self, nodes: Sequence[str]) -> dict[str, object]:
        """Return what a report of it must say: a fault of a node affects all ranks there."""
        place = self.culprit // self.on_node
        first = place * self.on_node
        ranks = [self.culprit]
        if self.how in OUTSIDE:
            ranks = list(range(first, first + self.on_node))
        elif (self.kind, self.how) == ("torchrun", "rendezvous"):
            ranks = []  # none has started
        return {"node": nodes[place], "ranks": ranks, "causes": sorted(_CAUSES[self.how])}


def plans(runs: int, healthy: int) -> list[Plan]:
    """Return all hangs so many times, and so many jobs of every healthy kind."""
    hangs = [
        Plan(kind=kind, how=how, number=number)
        for number in range(runs)
        for how in HANGS
        for kind in JOBS
        if (kind, how) not in LEFT_OUT
    ]
    return hangs + [Plan(kind=kind, number=number) for number in range(healthy) for kind in HEALTHY]


def is_right(run: dict[str, object]) -> bool:
    """Return whether a report named the node, the rank and the cause, and no other."""
    truth = run["truth"]
    assert isinstance(truth, dict)
    place = (run.get("nodes"), run.get("ranks"))
    return place == ([truth["node"]], truth["ranks"]) and run.get("cause") in truth["causes"]
