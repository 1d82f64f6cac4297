# SPDX-License-Identifier: Apache-2.0
"""UnkillableStepProgram: record the processes that outlive SIGKILL, while they are there.

slurmstepd runs it right before it drains the node. It decides nothing and drains nothing.
"""

from __future__ import annotations

import contextlib

import msgspec

from slurm_health.node import slurm_drains
from slurm_health.node.hook import Hook, number
from slurm_health.node.hooks.healthcheck import HEALTH_FILE, NodeHealth
from slurm_health.records.decoding import from_json


def run(hook: Hook) -> bool:
    """Record them; return False: the step's node is Slurm's to drain."""
    site, node = hook.site, hook.node
    with contextlib.suppress(OSError, msgspec.DecodeError):
        # Slurm names no node here. A host may have another name than its node.
        node = from_json((site.state / HEALTH_FILE).read_bytes(), NodeHealth).node
    job = number(hook.environ, "SLURM_JOB_ID", 0)
    if not job or site.recovery.slurm_drains == "off":
        return False
    array = number(hook.environ, "SLURM_ARRAY_JOB_ID", 0)
    now_s = hook.context.now_s
    record = slurm_drains.record_left(site, node, job, array=array, now_s=now_s)
    texts = [process.text for process in record.held] if record else []
    hook.log.warning(f"cannot be killed: {'; '.join(texts) or 'nothing is visible'}")
    return False
