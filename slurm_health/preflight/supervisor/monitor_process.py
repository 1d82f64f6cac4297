# SPDX-License-Identifier: Apache-2.0
"""The monitor beside the script: started with it, ended with it, and never waited for long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from slurm_health.system.processes import (
    PIPE,
    abandon_session,
    close_pipes,
    ends_within,
    own_module,
    start_tied,
)

OFF = "off"
# A script that ends sooner has no monitor: nothing can be known of its pace, and an array of
# thousands of short jobs must not cost a step each.
AFTER_S = 30.0
_LEAVE_S = 3.0  # what it needs to end the monitors of all nodes
_UNKILLABLE_S = 1.0


@contextlib.contextmanager
def beside(
    mode: str,
    *,
    directory: str,
    script_source: Path,
    environ: Mapping[bytes, bytes],
    mask: Collection[int],
    after_s: float = AFTER_S,
) -> Iterator[None]:
    """While active, the script is watched. Whatever becomes of the monitor, nothing is raised.

    `mode` is what the monitor does about a hang, or OFF; it begins after `after_s`, and writes to
    the journal in `directory`. The script stands in `script_source`.
    """
    if mode == OFF:
        yield
        return
    argv = own_module(
        "slurm_health.training.monitor.beside",
        f"--directory={directory}",
        f"--on-hang={mode}",
        f"--after-s={after_s:g}",
        f"--script-source={script_source}",
    )
    began_s = time.monotonic()
    try:
        # Its standard input ends with us, however we end.
        process = start_tied(
            argv, environ=environ, stdin=PIPE, stdout=1, stderr=None, signal_mask=mask
        )
    except OSError as err:
        print(f"slurm-health: no monitor: it cannot be started: {err}", file=sys.stderr, flush=True)
        yield
        return
    try:
        yield
    finally:
        close_pipes(process)
        if time.monotonic() - began_s >= after_s:
            ends_within(process, _LEAVE_S)
        abandon_session(process, wait_s=_UNKILLABLE_S)
