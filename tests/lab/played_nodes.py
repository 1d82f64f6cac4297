# SPDX-License-Identifier: Apache-2.0
"""Nodes of the lab whose probes are played: tests of what follows a verdict need no torch.

Slurm, its nodes, agents and jobs are real; only the process that would measure with torch is
`tests/support/fake_worker.py`, which behaves as it is told. So a verdict comes within seconds.
"""

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_health.preflight.acting.release_elsewhere import REVOKED_S
from tests.lab.installed_site import COMMAND, Site, eventually
from tests.lab.site_files import let_root_drain

FAKE_WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
FAULTY, SLOW, UNREACHABLE = "dies", "slow", "unreachable"
NEVER_READY, STUCK = "never-ready", "stuck"
RAN = "echo attempt $SLURM_RESTART_COUNT ran on $SLURM_JOB_NODELIST"


def play(site: Site, user: str = "alice", **behaviours: str) -> None:
    """From now on these nodes behave so in the jobs that `submit` submits; all others are well."""
    directory = Path(site.directory("played", user))
    for node in site.lab.nodes:
        (directory / node).write_text(behaviours.get(node, "well"))


def submit(
    site: Site,
    *words: str,
    user: str = "alice",
    env: Mapping[str, str] | None = None,
    script: str = RAN,
    **options: Any,
) -> int:
    """Submit a job that says where it ran, or the script in `words` where `script` is empty."""
    played = {"FAKE_WORKER_DIR": site.directory("played", user)}
    if user == "root":
        played |= let_root_drain(site.lab.home(user))
    # Words behind a script are its arguments.
    named = ("--wrap", script) if script else ()
    more = (f"--python={FAKE_WORKER}", "--open-mode=append", *named)
    return site.submit(*more, *words, user=user, env={**played, **(env or {})}, **options)


def command(site: Site, user: str = "alice") -> str:
    """Return `slurm-health check` for a shell script, with the nodes that `play` set."""
    where = shlex.quote(site.directory("played", user))
    return f"FAKE_WORKER_DIR={where} {COMMAND} check --python={shlex.quote(str(FAKE_WORKER))}"


def await_typist(site: Site) -> None:
    """Let pass what a person needs to type a command.

    Within the second in which an attempt ends, Slurm fails the next one: REVOKED_S tells why.
    """
    seen_s = time.time()
    eventually(site, lambda: time.time() > seen_s + REVOKED_S, "a second to type in")
