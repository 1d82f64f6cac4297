# SPDX-License-Identifier: Apache-2.0
"""What a health check starts to take a step: `... -m slurm_health.node.mending FILE STEP [GPU]...`.

With `deep-test HOURS` for STEP, what the job of a quarantine runs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from slurm_health.node.draining.shared_state import SharedStateUnusable
from slurm_health.node.mending import ledger, perform, quarantine
from slurm_health.node.mending.whose import why_not_now
from slurm_health.node.rules.mending import Tried
from slurm_health.node.site_settings import Site, load
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import SlurmError
from slurm_health.system.slurm.client import Client
from slurm_health.system.telemetry import send_line


def main(arguments: list[str]) -> int:
    """Take one step, or run one test; return the exit code."""
    config, order, *others = arguments
    site = load(Path(config))
    if order == "deep-test":
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        return quarantine.run_test(site, job, hours=float(others[0]), clock_s=time.monotonic)
    begun = from_json(order, Tried)
    with perform.at_work(site.state) as free:
        if not free:
            return 1
        ended = perform.take(site, begun, others, why_not=lambda: _why_not(site, begun))
        line = f"{begun.step.value}: {ended.outcome.value}: {ended.text}"
        try:
            ledger.keep(site, ended)
        except SharedStateUnusable as err:
            line += f" (not kept: {err})"
        send_line("warning", f"slurm-health: mend: node={begun.node} {line}")
    return 0


def _why_not(site: Site, begun: Tried) -> str:
    controller = Client.for_hook(os.environ, limit_s=site.hooks.slurm_limit_s)
    try:
        return why_not_now(controller.node(begun.node), begun.drain)
    except SlurmError as err:
        return f"Slurm cannot be asked: {err}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
