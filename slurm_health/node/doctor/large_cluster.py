# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about size: can one step run on all nodes, as a check does?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from slurm_health.node.doctor.advice import Advice, fine, look
from slurm_health.records.text import whole_number

# From slurm.conf(5): the square root of the number of nodes is best for the width of the tree, and
# for more nodes than this the cube root, with which a message arrives in three hops.
_SQUARE_ROOT_NODES = 2500
_MOST_HOPS = 3
# A check launches its agents once, twice more where nodes are lost, and each restart of a script
# comes with a check.
_FEW_STEPS = 1000
# Seen of srun (22.05): 24 nodes with 58 open files, and not 16 with 40. The rest is for those that
# it inherits.
_FILES_PER_NODE, _MORE_FILES = 2, 64


def advise(config: Mapping[str, str], nodes: int, open_files: float) -> list[Advice]:
    """Return what stands in the way of a step on all nodes of a cluster.

    Args:
        config: the fields of slurm.conf.
        nodes: how many there are.
        open_files: how many a process may have open here, at most.
    """
    found = [*_tree(config, nodes), *_steps(config), *_files(nodes, open_files)]
    return found or [fine(f"one step can run on all {nodes} nodes")]


def _tree(config: Mapping[str, str], nodes: int) -> Iterator[Advice]:
    width = whole_number(config.get("TreeWidth", ""))
    if not width or (hops := _hops(nodes, width)) <= _MOST_HOPS:
        return
    text = (
        f"TreeWidth={width}: a message to {nodes} nodes arrives after up to {hops} hops; a slurmd"
        " that hangs keeps it from all behind it, each time for MessageTimeout"
    )
    root = math.isqrt(nodes) if nodes <= _SQUARE_ROOT_NODES else round(nodes ** (1 / 3))
    yield look(text, f"TreeWidth={root + 1}")


def _hops(nodes: int, width: int) -> int:
    """Return in how many hops all are reached where each one passes it on to so many."""
    if width == 1:
        return nodes
    hops = reached = 0
    while reached < nodes:
        hops += 1
        reached += width**hops
    return hops


def _steps(config: Mapping[str, str]) -> Iterator[Advice]:
    limit = whole_number(config.get("MaxStepCount", ""))
    if limit is not None and limit < _FEW_STEPS:
        text = (
            f"MaxStepCount={limit}: a check takes up to three steps of its job, and each restart of"
            " a script another check, in addition to the script's own steps"
        )
        yield look(text, "MaxStepCount=40000, Slurm's default")


def _files(nodes: int, open_files: float) -> Iterator[Advice]:
    wanted = _FILES_PER_NODE * nodes + _MORE_FILES
    if open_files < wanted:
        text = (
            f"a process may have {open_files:.0f} files open on this machine: srun needs"
            f" {_FILES_PER_NODE} for each node of a step, and starts none on the nodes beyond"
        )
        yield look(text, f"LimitNOFILE={wanted} or more for slurmd, and as hard limit at login")
