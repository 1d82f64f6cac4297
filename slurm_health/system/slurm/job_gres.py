# SPDX-License-Identifier: Apache-2.0
"""The generic resources of a job on its nodes, and how a step requests all of them.

Slurm copies the job's request into a step without one, and a step of one task per node then gets
less than the job has: one device with `--gpus-per-task`, none with a bare `--exclusive`, and with
`--gpus` nearly any number. All this holds on 22.05.8, 24.11.5 and 26.05.5, if not noted otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_health.records.nodeset import expand

# One group of nodes in `scontrol show job --details`.
_NODES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
# `gpu:a100:2(IDX:0-1)`, `nic(CNT:2)`: name, type, number, and details.
_ITEM = re.compile(r"([^,:()]+)(?::([^,:()]*[^\d,:()][^,:()]*))?(?::(\d+))?(?:\(([^)]*)\))?")
_COUNTED = re.compile(r"CNT:(\d+)")
# A job's request for GPUs of any type: `gres:gpu:8`, since 23.11 `gres/gpu:8`.
_ANY_TYPE = re.compile(r" TresPer(?:Job|Node|Socket|Task)=(?:\S*,)?gres[:/]gpu(?:[:=]\d+)?(?:,|\s)")

# Shown by releases that accept a request per node also in a job whose nodes differ (24.11.5 and
# 26.05.5). On 24.11.5 a step on one of these nodes with `--gpus` waits for ever.
_TAKES_PER_NODE = " AllocTRES="

# Set if the script itself has GPUs, or its job has some by number.
_OF_GPUS = ("SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_TRES_PER_TASK", "CUDA_VISIBLE_", "ROCR_VISIBLE_")


@dataclass(frozen=True, kw_only=True)
class NodeGres:
    """The generic resources of a job on one node.

    `gpus` counts all types together. `request` is the value of `--gpus` for all of them, `others`
    the values of `--gres` for the rest. `per_node`: a step may request the same on every node of
    its own although other nodes of the job have something else.
    """

    gpus: int = 0
    request: str = ""
    others: tuple[str, ...] = ()
    per_node: bool = False


@dataclass(frozen=True, kw_only=True)
class Share:
    """Nodes that one step can serve, the options of srun for all GPUs, and their number."""

    nodes: tuple[str, ...]
    options: tuple[str, ...] = ()
    gpus: int = 0


def gres_of(shown: str) -> dict[str, NodeGres]:
    """Read the output of `scontrol show job --details --oneliner` for one job.

    Raises:
        ValueError: a node list cannot be read.
    """
    any_type = _ANY_TYPE.search(shown) is not None
    by_node: dict[str, NodeGres] = {}
    for nodelist, text in _NODES.findall(shown):
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
        # Slurm accepts a type only if the job named it, or named nothing.
        request = str(total) if any_type else ",".join(typed for typed, _ in gpus)
        gres = NodeGres(
            gpus=total,
            request=request if total else "",
            others=tuple(others),
            per_node=_TAKES_PER_NODE in shown,
        )
        for node in expand(nodelist):
            by_node.setdefault(node, gres)
    return by_node


def may_have_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether a job may have GPUs, from the environment that Slurm gives its script.

    In any other environment, such as a shell of salloc, it may.
    """
    return "SLURMD_NODENAME" not in environ or any(name.startswith(_OF_GPUS) for name in environ)


def shares(nodes: Sequence[str], gres: Mapping[str, NodeGres]) -> list[Share]:
    """Return the steps in which these nodes show all resources that the job has there.

    Nodes with the same resources share a step. Only Slurm 22.05, if the job's nodes differ, refuses
    a request per node that the node can satisfy, and accepts one for the whole step: then every
    node has a step of its own.
    """
    if len(set(gres.values())) > 1 and not any(has.per_node for has in gres.values()):
        return [_alone(node, gres.get(node, NodeGres())) for node in nodes]
    alike: dict[NodeGres, list[str]] = {}
    for node in nodes:
        alike.setdefault(gres.get(node, NodeGres()), []).append(node)
    steps = []
    for has, members in alike.items():
        items = [f"gpu:{typed}" for typed in has.request.split(",") if typed]
        options = _options("--gres=" + ",".join([*items, *has.others])) if items else ()
        steps.append(Share(nodes=tuple(members), options=options, gpus=has.gpus))
    return steps


def _alone(node: str, has: NodeGres) -> Share:
    options = _options(f"--gpus={has.request}") if has.gpus else ()
    if has.gpus and has.others:
        options += (f"--gres={','.join(has.others)}",)
    return Share(nodes=(node,), options=options, gpus=has.gpus)


def _options(request: str) -> tuple[str, ...]:
    # --gpus-per-task would also bind the task to what one task of the job may use.
    return (request, "--gpu-bind=none")
