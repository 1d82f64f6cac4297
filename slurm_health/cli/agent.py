# SPDX-License-Identifier: Apache-2.0
"""`python -m slurm_health agent`: one per node of a check, so it loads no more than it needs.

That is no click: a quarter of what an agent would load, on every node of every check.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec

from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.order_poller import JournalNotVisible
from slurm_health.preflight.agent.workers import AgentSettings
from slurm_health.records.errors import ExitCode, SlurmHealthError, UsageError
from slurm_health.system.signals import FOR_SCRIPT


def main() -> None:
    """Serve one node of a check. Started by the master, which reads on stderr why it cannot."""
    try:
        code = serve(sys.argv[2:])
    except UsageError as err:
        print(f"slurm-health: {err}", file=sys.stderr)
        sys.exit(int(err.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        import traceback  # seldom needed

        # Python's own code for this is 1, which here says that a node is bad.
        traceback.print_exc()
        sys.exit(int(ExitCode.INTERNAL))
    sys.exit(int(code))


def serve(words: Sequence[str]) -> ExitCode:
    """Serve a node as the words of its command line say; return how that ended.

    Raises:
        UsageError: a word is none of an agent's, or one is missing.
    """
    for number in FOR_SCRIPT:  # `sbatch --signal` sends them to every step
        signal.signal(number, signal.SIG_IGN)
    settings = settings_of(words)
    try:
        Agent(settings, dict(os.environ)).run()
    except JournalNotVisible as err:
        return _cannot(settings.node, f"does not see the master's journal {err}")
    except SlurmHealthError as err:
        return _cannot(settings.node, str(err))
    return ExitCode.HEALTHY


def settings_of(words: Sequence[str]) -> AgentSettings:
    """Return what the master tells an agent: `--name=value` for each of its settings.

    Raises:
        UsageError: a word is none of these, or one is missing.
    """
    given: dict[str, object] = {"node": os.environ.get("SLURMD_NODENAME") or socket.gethostname()}
    for word in words:
        name, _, text = word.removeprefix("--").partition("=")
        given[name.replace("-", "_")] = text.split(",") if name == "programs" else text
    try:
        return msgspec.convert(
            given, AgentSettings, strict=False, dec_hook=lambda kind, text: kind(text)
        )
    except msgspec.ValidationError as err:
        raise UsageError(f"an agent cannot read its instructions: {err}") from err


def _cannot(node: str, why: str) -> ExitCode:
    print(f"slurm-health agent: {node}: {why}", file=sys.stderr, flush=True)
    return ExitCode.UNAVAILABLE
