# SPDX-License-Identifier: Apache-2.0
"""Why Slurm ends a job: by its own line in the job's output, or by the job's state.

While a job is being ended, some releases of Slurm show only the state COMPLETING.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from slurm_health.records.allocation import name_in_slurm
from slurm_health.records.errors import SlurmError
from slurm_health.records.script_records import TIME_LIMIT
from slurm_health.system.killable import Answered, run_one
from slurm_health.system.slurm.client import Client

_CANCELLED = "the job was cancelled"
_PREEMPTED = "the job had to make way for another one"
_REQUEUED = "the job was requeued"
_LOST = "Slurm has lost a node of the job"
# slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***
# Since 25.05, scancel: … CANCELLED AT 2026-11-22T10:00:00 DUE to SIGNAL Terminated ***
_LINE = re.compile(
    rb"\*\*\* JOB (\d+) ON \S+ CANCELLED AT ([\dT:-]{19})"
    rb"(?: DUE (?:TO|to) ([A-Z ]+?)(?: Terminated| Killed)?)? \*"
)
_DUE_TO = {
    "": _CANCELLED,
    "SIGNAL": _CANCELLED,
    "TIME LIMIT": TIME_LIMIT,
    "PREEMPTION": _PREEMPTED,
    "JOB REQUEUE": _REQUEUED,
    "NODE FAILURE": _LOST,
}
# The more telling ones first: a requeued job is pending.
_STATES = {
    "CANCELLED": _CANCELLED,
    "PREEMPTED": _PREEMPTED,
    "TIMEOUT": TIME_LIMIT,
    "NODE_FAIL": _LOST,
    "REQUEUED": _REQUEUED,
    "PENDING": _REQUEUED,
}
_TAIL_BYTES = 4096
_TAIL_S = 1.0  # a read from the page cache takes a millisecond
# An earlier attempt of the job may have left its line in the same file.
_RECENT_S = 120.0
# Slurm kills a job 30 s after its signal (KillWait).
_PATIENCE_S = 2.0


def became(environ: Mapping[str, str], *, now_s: float, output: int = 2) -> str:
    """Return why the job of these variables ends; empty if neither output nor state shows it."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return ""
    if why := in_output(_tail(output), job, now_s=now_s):
        return why
    client = Client(environ, patience_s=0.0, deadline_s=_PATIENCE_S)
    with contextlib.suppress(SlurmError):
        return of_states(client.job(name_in_slurm(environ)).states)
    return ""


def ends_in_output(environ: Mapping[str, str], *, now_s: float, output: int = 2) -> bool:
    """Return whether the output of the job of these variables has Slurm's line about its end.

    slurmstepd writes it before it signals any process of the job.
    """
    job = environ.get("SLURM_JOB_ID", "")
    return bool(job and in_output(_tail(output), job, now_s=now_s))


def in_output(text: bytes, job: str, *, now_s: float) -> str:
    """Return the reason in Slurm's line in a job's output; empty without a recent line."""
    for match in reversed(list(_LINE.finditer(text))):
        number, when, due_to = (group.decode() if group else "" for group in match.groups())
        if number == job and any(abs(now_s - time_s) < _RECENT_S for time_s in _times_s(when)):
            return _DUE_TO.get(due_to, "")
    return ""


def _times_s(when: str) -> Iterator[float]:
    """Yield the possible times of a local time, in seconds since the epoch.

    Slurm's daemons write the machine's own time, the job may have another (TZ). An hour that a
    clock shows twice has two.
    """
    machine: tzinfo = UTC
    with contextlib.suppress(OSError, ValueError), Path("/etc/localtime").open("rb") as file:
        machine = ZoneInfo.from_file(file)
    with contextlib.suppress(ValueError, OverflowError):
        local = datetime.strptime(when, "%Y-%m-%dT%H:%M:%S")
        for zone in (None, machine):
            for fold in (0, 1):
                yield local.replace(tzinfo=zone, fold=fold).timestamp()


def _tail(output: int) -> bytes:
    """Return the end of an open file, to which other processes write as well.

    If the filesystem does not answer, it is empty: no job waits for it.
    """
    # By the path of ours: the child that reads has other standard streams.
    ours = Path(f"/proc/{os.getpid()}/fd/{output}")
    match run_one(lambda: _end_of(ours), _TAIL_S):
        case Answered(data=data):
            return data
    return b""


def _end_of(path: Path) -> bytes:
    if not stat.S_ISREG(path.stat().st_mode):
        return b""
    with path.open("rb", buffering=0) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)


def of_states(states: Collection[str]) -> str:
    """Return why a job in these states of Slurm's ended; empty if it ended by itself."""
    return next((text for state, text in _STATES.items() if state in states), "")
