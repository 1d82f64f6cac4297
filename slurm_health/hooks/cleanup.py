# SPDX-License-Identifier: Apache-2.0
"""End what the ended job left running. Only processes of its own user that carry its number."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import msgspec

from slurm_health.checks.check import Place, Unmeasured
from slurm_health.checks.tasks import Process, of_job, parse_stat
from slurm_health.hooks.children import Answered, run_one

_GRACE_S = 1.0
_POLL_S = 0.05
_LIMIT_S = 5.0


def end_leftovers(place: Place) -> list[Process]:
    """Kill what the job left; return what is still there a second later."""
    outcome = run_one(lambda: msgspec.msgpack.encode(_end(place)), _LIMIT_S)
    if isinstance(outcome, Answered):
        return msgspec.msgpack.decode(outcome.data, type=list[Process])
    return []


def _end(place: Place) -> list[Process]:
    give_up_s = time.monotonic() + _GRACE_S
    while left := of_job(place):
        for each in left:
            _kill(place, each)
        if time.monotonic() >= give_up_s:
            break
        time.sleep(_POLL_S)
    return left


def _kill(place: Place, process: Process) -> None:
    """Kill this very process: its number may have passed to another meanwhile."""
    with contextlib.suppress(OSError, Unmeasured, ValueError, IndexError):
        held = os.pidfd_open(process.pid)
        try:
            now = parse_stat(place.read(f"/proc/{process.pid}/stat"))
            if now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)
