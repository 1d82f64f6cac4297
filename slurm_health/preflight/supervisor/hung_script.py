# SPDX-License-Identifier: Apache-2.0
"""A script whose training hangs, ended with all that it started here, and with its steps.

Its interpreter comes first, so that it does not go on with its next command once a step has ended.
Ranks may be in sessions of their own, as torchrun's are, or stopped; so all that descends from the
script is killed. Steps on other nodes outlive an srun that is killed, and Slurm ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from slurm_health.preflight.supervisor.recorder import say
from slurm_health.preflight.supervisor.signal_witness import ALL_SIGNALS
from slurm_health.system import proc
from slurm_health.system.processes import fork

GRACE_S = 5.0  # between SIGTERM, for which a script may have a trap, and SIGKILL
_STEPS_S = 40.0  # for Slurm to end the steps; a node that does not answer takes longer
_POLL_S = 0.1

_Known = dict[int, int]
"""Processes, and when each was started: that tells it from a later one of the same number."""


def end(pid: int, grace_s: float = GRACE_S) -> None:
    """End the script, a child that is still to be waited for and leads a group, and all below it.

    None of it is left but what hangs in the kernel, or has cut itself off from it before.
    """
    known = _below(pid, {})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
    until_s = time.monotonic() + grace_s
    while _alive(known) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        known = _below(pid, known)
    until_s = time.monotonic() + grace_s
    while (alive := _alive(known)) and time.monotonic() < until_s:
        for each in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)
        known = _below(pid, known)


def end_steps(environ: Mapping[bytes, bytes], mask: Collection[int]) -> None:
    """End the job's steps that are the script's; not for long, and in a child with `mask`."""
    text = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    child = fork(lambda: _end_steps(text, mask))
    until_s = time.monotonic() + _STEPS_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            say(f"the steps of the script have not ended within {_STEPS_S:g} s")
            return
        signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)


def _end_steps(environ: Mapping[str, str], mask: Collection[int]) -> int:
    from slurm_health.records.errors import SlurmError
    from slurm_health.system.slurm.client import Client  # needed by few jobs

    signal.pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS & frozenset(mask))
    client = Client(environ)
    try:
        while steps := client.steps_of(environ["SLURM_JOB_ID"]):
            client.kill_steps(steps)
            time.sleep(1.0)
    except SlurmError as err:
        say(f"the steps of the script could not be ended: {err}")
    return 0


def _below(pid: int, known: _Known) -> _Known:
    """Return the processes that were known, and all that descend from them or from the script."""
    children: dict[int, list[proc.Stat]] = {}
    found: _Known = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            each = proc.stat(process)
            children.setdefault(each.parent, []).append(each)
            if each.pid == pid or known.get(each.pid) == each.start_ticks:
                found[each.pid] = each.start_ticks
    queue = list(found)
    while queue:
        for each in children.get(queue.pop(), ()):
            if each.pid not in found:
                found[each.pid] = each.start_ticks
                queue.append(each.pid)
    return found


def _alive(known: _Known) -> list[int]:
    alive = []
    for pid, start_ticks in known.items():
        with contextlib.suppress(OSError, ValueError):
            now = proc.stat(Path(f"/proc/{pid}"))
            if now.start_ticks == start_ticks and now.state not in {"Z", "X"}:
                alive.append(pid)
    return alive
