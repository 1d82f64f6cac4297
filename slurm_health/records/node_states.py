# SPDX-License-Identifier: Apache-2.0
"""What Slurm's words for the state of a node say: `IDLE+DRAIN`, `ALLOCATED*`.

Whole words count: POWER_DOWN is what Slurm is to do to a healthy node once its job is over.
"""

from __future__ import annotations

_MARKS = "*~#!%$@^-"
_SILENT_MARK = "*"  # as sinfo says NOT_RESPONDING
# What Slurm has done to a node, which is silent for it. None runs a job meanwhile.
_SILENCED = frozenset({"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED"})


def words_of(state: str) -> frozenset[str]:
    """Return the words of a state, without marks such as `*`."""
    return frozenset(word.rstrip(_MARKS) for word in state.split("+") if word)


def is_down(state: str) -> bool:
    """Tell whether Slurm has given a node up, and ended what ran there."""
    return "DOWN" in words_of(state)


def is_lost(state: str) -> bool:
    """Tell whether Slurm has lost a node: it is down or does not answer.

    FAIL is none: an administrator expects the node to fail, and its job goes on. Nor is a node
    whose power Slurm has taken, or that it boots: that happens to nodes that no job has any more.
    """
    words = words_of(state)
    silent = "NOT_RESPONDING" in words or _SILENT_MARK in state
    return "DOWN" in words or (silent and words.isdisjoint(_SILENCED))
