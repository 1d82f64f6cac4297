# SPDX-License-Identifier: Apache-2.0
"""What the shims start: `python -I -m slurm_health.node.hooks prolog`. No click: it is not free.

Ends with FAULT for a proven fault of the node after which the job must not start here, with 0
otherwise, and with anything else for an error of its own, which the shim logs and turns into 0.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from slurm_health.node.site import Site

FAULT = 99
USAGE = 2
UNUSABLE = 78
# For so long after its start a health check asks Slurm: its shim ends it after 50 s, because Slurm
# kills it after 60, and after its last question it may have to wait for the ledger and save its
# result. The next health check does what is left.
ASKS_SLURM_S = 36.0


def main(arguments: list[str]) -> int:
    """Run one hook and return its exit code."""
    gc.disable()  # a few milliseconds of life, and children that would only copy what it touches
    name, config = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in {"prolog", "epilog", "healthcheck", "unkillable"} or len(config) > 1:
        names = "prolog|epilog|healthcheck|unkillable"
        print(f"usage: slurm_health.node.hooks {names} [FILE]", file=sys.stderr)
        return USAGE
    from slurm_health.node.site import load_for_hook
    from slurm_health.records.errors import ConfigError
    from slurm_health.system.site_file import SITE_FILE

    try:
        site = load_for_hook(Path(config[0] if config else SITE_FILE))
    except ConfigError as err:
        _log(name, f"nothing is checked: {err}")
        return UNUSABLE
    return FAULT if run(name, site, os.environ) else 0


def run(name: str, site: Site, environ: Mapping[str, str]) -> bool:
    """Run one hook, now and on this node; return its answer, which its own `run` explains."""
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.hook import Hook

    context = CheckContext(environ=dict(environ), now_s=time.time(), state=site.state, context=name)
    give_up_s = time.monotonic() + ASKS_SLURM_S if name == "healthcheck" else math.inf
    hook = Hook(site, environ, context, give_up_s=give_up_s)
    answer: bool = importlib.import_module(f"slurm_health.node.hooks.{name}").run(hook)
    return answer


def _log(name: str, text: str) -> None:
    from slurm_health.node.log import Log
    from slurm_health.node.run import node_name

    Log(name, node_name(os.environ), os.environ.get("SLURM_JOB_ID", "")).error(text)


def _leave(code: int) -> NoReturn:
    """End at once: to take apart what was loaded takes a quarter as long as loading it did."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
