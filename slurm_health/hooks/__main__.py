# SPDX-License-Identifier: Apache-2.0
"""What the shims start: `python -I -m slurm_health.hooks prolog`. No click: it is not free.

Ends with FAULT for a proven fault of the node after which the job must not start here, with 0
otherwise, and with anything else for an error of its own, which the shim logs and turns into 0.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_health.checks.check import CheckContext
    from slurm_health.site_settings import Site

FAULT = 99
USAGE = 2
UNUSABLE = 78
SITE_FILE = "/etc/slurm-health/config.toml"


def main(arguments: list[str]) -> int:
    """Run one hook and return its exit code."""
    gc.disable()  # a few milliseconds of life, and children that would only copy what it touches
    hook, config = (arguments[0], arguments[1:]) if arguments else ("", [])
    if hook not in {"prolog", "epilog", "healthcheck"} or len(config) > 1:
        print("usage: slurm_health.hooks prolog|epilog|healthcheck [FILE]", file=sys.stderr)
        return USAGE
    from slurm_health.checks.check import CheckContext
    from slurm_health.errors import ConfigError
    from slurm_health.site_settings import load

    path = Path(config[0] if config else SITE_FILE)
    try:
        site = load(path, owner=os.getuid())
    except ConfigError as err:
        _log(hook, f"nothing is checked: {err}")
        return UNUSABLE
    place = CheckContext(
        environ=dict(os.environ), now_s=time.time(), state=site.state, context=hook
    )
    return FAULT if _run(hook, site, place) else 0


def _run(hook: str, site: Site, place: CheckContext) -> bool:
    if hook == "prolog":
        from slurm_health.hooks import prolog

        return prolog.run(site, os.environ, place)
    if hook == "epilog":
        from slurm_health.hooks import epilog

        return epilog.run(site, os.environ, place)
    from slurm_health.hooks import healthcheck

    return healthcheck.run(site, os.environ, place)


def _log(hook: str, text: str) -> None:
    from slurm_health.hooks.log import Log
    from slurm_health.hooks.run_checks import node_name

    Log(hook, node_name(os.environ), os.environ.get("SLURM_JOB_ID", "")).error(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
