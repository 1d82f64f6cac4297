# SPDX-License-Identifier: Apache-2.0
"""What a job has of generic resources on each of its nodes, and how a step asks for all of it.

Slurm copies what the job asked for into a step that asks for nothing, and a step of one task per
node then sees less than the job has: one device with `--gpus-per-task`, none with a bare
`--exclusive`, and with `--gpus` nearly any number. Where nothing else is said, it was seen on
22.05.8, 24.11.5 and 26.05.5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_health.records.nodeset import expand

# One group of nodes in `scontrol show job --details`.
_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
# `gpu:a100:2(IDX:0-1)`, `nic(CNT:2)`: the name, its type, the number, and what is behind it.
_ITEM = re.compile(r"([^,:()]+)(?::([^,:()]*[^\d,:()][^,:()]*))?(?::(\d+))?(?:\(([^)]*)\))?")
_COUNTED = re.compile(r"CNT:(\d+)")
# GPUs of any type, as a job asked for them: `gres:gpu:8`, since 23.11 `gres/gpu:8`.
_ANY_TYPE = re.compile(r" TresPer(?:Job|Node|Socket|Task)=(?:\S*,)?gres[:/]gpu(?:[:=]\d+)?(?:,|\s)")

# Shown by releases that take a request per node also in a job whose nodes differ (seen on 24.11.5
# and 26.05.5). On 24.11.5 a step on one of these nodes that asks with `--gpus` waits for ever.
_TAKES_PER_NODE = " AllocTRES="

# Set where the script itself has GPUs, or its job has some by number.
_OF_GPUS = ("SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_TRES_PER_TASK", "CUDA_VISIBLE_", "ROCR_VISIBLE_")


@dataclass(frozen=True, kw_only=True)
class NodeGres:
    """The generic resources of a job on one node.

    `gpus` counts those of every type together. `request` asks for all of them as `--gpus` would,
    `others` for the rest as `--gres` would. `per_node`: a step may ask for so much on each of its
    nodes although other nodes of the job have something else.
    """

    gpus: int = 0
    request: str = ""
    others: tuple[str, ...] = ()
    per_node: bool = False


@dataclass(frozen=True, kw_only=True)
class Share:
    """Nodes that one step can serve, what srun is told for it to see all GPUs, and how many."""

    nodes: tuple[str, ...]
    options: tuple[str, ...] = ()
    gpus: int = 0


def gres_of(shown: str) -> dict[str, NodeGres]:
    """Read the output of `scontrol show job --details --oneliner` for one job.

    Raises:
        ValueError: a node list cannot be read.
    """
    any_type = _ANY_TYPE.search(shown) is not None
    per_node = _TAKES_PER_NODE in shown
    found: dict[str, NodeGres] = {}
    for nodelist, text in _NODES.findall(shown):
        gres = replace(_node_gres(text, any_type=any_type), per_node=per_node)
        for node in expand(nodelist):
            found.setdefault(node, gres)
    return found


def may_have_gpus(environ: Mapping[str, str]) -> bool:
    """Tell whether a job may have GPUs, by what Slurm puts into the environment of its script.

    Elsewhere, as in a shell of salloc, nothing is said for sure.
    """
    return "SLURMD_NODENAME" not in environ or any(name.startswith(_OF_GPUS) for name in environ)


def shares(nodes: Sequence[str], gres: Mapping[str, NodeGres]) -> list[Share]:
    """Return the steps in which each of these nodes shows all that the job has there.

    One for all nodes that have the same. Only Slurm 22.05, where the job's nodes differ, refuses a
    request per node that is within what the node has, and takes one for the whole step: then each
    node has a step of its own.
    """
    if len(set(gres.values())) > 1 and not any(has.per_node for has in gres.values()):
        return [_alone(node, gres.get(node, NodeGres())) for node in nodes]
    alike: dict[NodeGres, list[str]] = {}
    for node in nodes:
        alike.setdefault(gres.get(node, NodeGres()), []).append(node)
    return [
        Share(nodes=tuple(members), options=_per_node(has), gpus=has.gpus)
        for has, members in alike.items()
    ]


def _node_gres(text: str, *, any_type: bool) -> NodeGres:
    gpus: list[tuple[str, int]] = []
    others = []
    for name, kind, number, more in _ITEM.findall(text):
        counted = _COUNTED.search(more)
        count = int(number or (counted[1] if counted else 0))
        typed = f"{kind}:{count}" if kind else str(count)
        if count and name == "gpu":
            gpus.append((typed, count))
        elif count:
            others.append(f"{name}:{typed}")
    total = sum(count for _, count in gpus)
    # Slurm takes a type only where the job named it, or named nothing.
    request = str(total) if any_type else ",".join(typed for typed, _ in gpus)
    return NodeGres(gpus=total, request=request if total else "", others=tuple(others))


def _per_node(has: NodeGres) -> tuple[str, ...]:
    items = [f"gpu:{typed}" for typed in has.request.split(",") if typed]
    return _options("--gres=" + ",".join([*items, *has.others])) if items else ()


def _alone(node: str, has: NodeGres) -> Share:
    options = _options(f"--gpus={has.request}") if has.gpus else ()
    if has.gpus and has.others:
        options += (f"--gres={','.join(has.others)}",)
    return Share(nodes=(node,), options=options, gpus=has.gpus)


def _options(request: str) -> tuple[str, ...]:
    # --gpus-per-task would also bind the task to what one task of the job may use.
    return (request, "--gpu-bind=none")
