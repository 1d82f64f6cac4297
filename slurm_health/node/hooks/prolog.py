# SPDX-License-Identifier: Apache-2.0
"""Before a job: check the node; drain it and have the job requeued only for a proven fault."""

from __future__ import annotations

from slurm_health.node.hook import Hook
from slurm_health.node.rules.finding import node_faults


def run(hook: Hook) -> bool:
    """Run the checks of the prolog; return whether the job must not start here.

    Without a drain the job must start: a failed prolog makes Slurm drain, past the breaker.
    """
    faults = node_faults(hook.check())
    if faults and hook.sync_drain():
        faults = node_faults(hook.check())
    return bool(faults) and hook.drain(hook.cause(faults))
