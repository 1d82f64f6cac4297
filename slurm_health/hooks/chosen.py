# SPDX-License-Identifier: Apache-2.0
"""Which configured checks run here, in this hook, for this job; and why the others do not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurm_health.checks.check import Check
from slurm_health.core.node_pattern import matches
from slurm_health.hooks.runner import Planned


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A check, and why it does not run here; empty when it does."""

    planned: Planned
    why_not: str


def node_name(environ: Mapping[str, str]) -> str:
    """Return this node's name: what slurmd says, else the host's own without its domain."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def choose(
    checks: Iterable[Planned], *, context: str, node: str, partition: str | None
) -> list[Choice]:
    """Decide for each check whether it runs.

    Args:
        checks: all that are configured.
        context: the hook.
        node: this node's name.
        partition: the job's, None where nobody knows: then a check for some partitions only
            does not run.
    """
    return [
        Choice(planned=each, why_not=_why_not(each, context, node, partition)) for each in checks
    ]


def _why_not(planned: Planned, context: str, node: str, partition: str | None) -> str:
    if context not in planned.contexts:
        return f"runs in {', '.join(planned.contexts) or 'no hook'}"
    if not matches(node, planned.nodes):
        return f"for nodes {' '.join(planned.nodes)}, this is {node}"
    if planned.partitions and partition is None:
        return f"for partitions {' '.join(planned.partitions)}, and there is no job here"
    if planned.partitions and not matches(str(partition), planned.partitions):
        return f"for partitions {' '.join(planned.partitions)}, the job's is {partition}"
    return ""


def running(choices: Iterable[Choice]) -> list[Planned]:
    """Return the checks that run."""
    return [each.planned for each in choices if not each.why_not]


def confirming(checks: Sequence[Planned], component: str, node: str) -> list[Planned]:
    """Return the checks that can confirm that this component of this node is bad."""
    choices = choose(checks, context="retest", node=node, partition=None)
    return [each for each in running(choices) if _tests(each.check, component)]


def _tests(check: Check, component: str) -> bool:
    # "node" says that something is wrong and not what.
    return component == "node" or component in check.COMPONENTS
