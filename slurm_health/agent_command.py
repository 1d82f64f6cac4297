# SPDX-License-Identifier: Apache-2.0
"""`slurm-health agent`: one per node, started by the master."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import Any

from slurm_health.agent import Agent, AgentSettings, JournalNotVisible
from slurm_health.errors import ExitCode, SlurmHealthError


def serve(node: str | None, settings: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Run the agent of this node; say on standard error, for the launcher, why it cannot."""
    name = node or environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        Agent(AgentSettings(node=name, **settings), environ).run()
    except JournalNotVisible as err:
        return _cannot(name, f"does not see the master's journal {err}")
    except SlurmHealthError as err:
        return _cannot(name, str(err))
    return int(ExitCode.HEALTHY)


def _cannot(node: str, why: str) -> int:
    print(f"slurm-health agent: {node}: {why}", file=sys.stderr, flush=True)
    return int(ExitCode.UNAVAILABLE)
