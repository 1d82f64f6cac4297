# SPDX-License-Identifier: Apache-2.0
"""Runs a master over local agents: `check_main.py DIRECTORY PYTHON NODE...`; prints the verdict.

With a run directory that a killed one left, it goes on with that run, as a batch job would.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_health.preflight.master.launcher import LocalLauncher
from slurm_health.preflight.master.master import Master
from slurm_health.preflight.master.run_check import agent_command, make_localizer
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.records import Disposition, JobOutcome, VerdictReached
from tests.support.journals import run_started
from tests.support.session_story import QUICK

RUN_ID = "r1"
LIMITS = TimeLimits(round_deadline_s=3.0, least_margin_s=1.0, most_margin_s=1.0, abort_grace_s=2.0)


def run(directory: Path, python: str, nodes: Sequence[str]) -> VerdictReached:
    """Check these nodes; nothing that was started is left afterwards."""
    command = agent_command(directory, run_id=RUN_ID, nodes=len(nodes), python=python)
    master = Master(
        directory,
        Controller(nodes, make_localizer, LIMITS, QUICK),
        LocalLauncher(command, os.environ, nodes),
    )
    try:
        master.open(run_started(nodes, run_id=RUN_ID))
        verdict = master.run()
        master.finish(JobOutcome(disposition=Disposition.PROCEED, exit_code=0))
    finally:
        master.close()
    return verdict


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    print(json.dumps({node.node: node.level.value for node in found.nodes}))
