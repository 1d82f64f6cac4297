# SPDX-License-Identifier: Apache-2.0
"""Check an accused node together with partners, by a job of the site's own user.

The epilog of the user's job starts this as a detached process. It runs `slurm-health sweep --node`
as the user of `[sweep]`; the epilog of that job acts on its verdict.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.node import shared
from slurm_health.node.log import Log
from slurm_health.node.marks import MARKS
from slurm_health.node.rules import accusations
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site, load
from slurm_health.records.decoding import from_json
from slurm_health.system import SYSTEM_PATH, processes

_LIMIT_S = 120.0
_SITE_FILE = "SLURM_HEALTH_CONFIG"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The node to check, its partition, and the job that accuses it."""

    node: str
    partition: str
    job: int
    time_s: float


def start(site: Site, request: Request, environ: Mapping[str, str]) -> None:
    """Start the process that has a node checked.

    Raises:
        OSError: it cannot be started.
    """
    order = msgspec.json.encode(request).decode()
    argv = processes.own_module("slurm_health.node.hooks.partners", site.path, order)
    processes.start_detached(argv, environ)


def is_of_sweep(site: Site, uid: int) -> bool:
    """Return whether a user is the one of `[sweep]`, whose checks are the site's own."""
    if not site.sweep.user:
        return False
    try:
        return pwd.getpwnam(site.sweep.user).pw_uid == uid
    except KeyError:
        return False


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the sweep for one node, without nodes that are marked themselves, and log its output."""
    config, order = arguments
    site, request = load(Path(config)), from_json(order, Request)
    log = Log("epilog", request.node, str(request.job))

    def marked() -> list[str]:
        return [
            node
            for node, own in MARKS.load(site.breaker).items()
            if node != request.node and accusations.alive(own, request.time_s)
        ]

    try:
        avoid = shared.in_child(site, marked, list[str])
    except StoreUnusable as err:
        log.warning(f"not checked with partners: {err}")
        return 1
    options = {
        "partition": request.partition,
        "node": request.node,
        "avoid": ",".join(avoid),
        "check": site.sweep.check,
        "python": site.sweep.python,
        "journal": site.journal,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    more = ("--", *site.sweep.sbatch) if site.sweep.sbatch else ()
    path = f"{environ.get('PATH', SYSTEM_PATH)}:{SYSTEM_PATH}"
    named = {name: environ[name] for name in ("SLURM_CONF",) if name in environ}
    try:
        home = pwd.getpwnam(site.sweep.user).pw_dir
        output = processes.run_for_site(
            processes.own_command("sweep", *words, *more),
            _LIMIT_S,
            environ={"PATH": path, "HOME": home, _SITE_FILE: config, **named},
            user=site.sweep.user if os.geteuid() == 0 else None,
        )
    except (processes.CommandFailed, KeyError) as err:
        log.warning(f"not checked with partners: {err}")
        return 1
    log.info(f"checked with partners, as {site.sweep.user}: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
