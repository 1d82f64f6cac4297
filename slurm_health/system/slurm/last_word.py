# SPDX-License-Identifier: Apache-2.0
"""What becomes of a job whose processes Slurm ends: its own line in the job's output, or its word.

While a job is being ended, some releases of Slurm say no more of its state than COMPLETING.
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
from slurm_health.system.killable import Answered, run_one
from slurm_health.system.slurm.client import Client

TIME_LIMIT = "the job reached its time limit"
_CANCELLED = "the job was cancelled"
_PREEMPTED = "the job had to make way for another one"
_REQUEUED = "the job was requeued"
_LOST = "Slurm has lost a node of the job"
# slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO TIME LIMIT ***
_LINE = re.compile(rb"\*\*\* JOB (\d+) ON \S+ CANCELLED AT ([\dT:-]{19})(?: DUE TO ([A-Z ]+))? \*")
_DUE_TO = {
    "": _CANCELLED,
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
_TAIL_S = 1.0  # what lies in the page cache is there in a millisecond
# An earlier attempt of the job may have left its line in the same file.
_RECENT_S = 120.0
# Slurm kills what it ends 30 s after its signal, or when its site says.
_PATIENCE_S = 2.0


def became(environ: Mapping[str, str], *, now_s: float, output: int = 2) -> str:
    """Return what becomes of the job of these variables; empty where nobody says so at once."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return ""
    return in_output(_tail(output), job, now_s=now_s) or _as_slurm_says(environ)


def ends_in_output(environ: Mapping[str, str], *, now_s: float, output: int = 2) -> bool:
    """Tell whether Slurm's line that the job of these variables is ended stands in its output.

    slurmstepd writes it before it signals any process of the job.
    """
    job = environ.get("SLURM_JOB_ID", "")
    return bool(job and in_output(_tail(output), job, now_s=now_s))


def in_output(text: bytes, job: str, *, now_s: float) -> str:
    """Return what Slurm's line in a job's output tells; empty where there is none of now."""
    for found in reversed(list(_LINE.finditer(text))):
        number, when, due_to = (each.decode() if each else "" for each in found.groups())
        if number == job and any(abs(now_s - each) < _RECENT_S for each in _written_s(when)):
            return _DUE_TO.get(due_to, "")
    return ""


def _written_s(when: str) -> Iterator[float]:
    """Yield when that may have been, in seconds since the epoch.

    Slurm's daemons write the machine's own time, the job may have another (TZ). Of an hour that a
    clock shows twice, both.
    """
    with contextlib.suppress(ValueError, OverflowError):
        told = datetime.strptime(when, "%Y-%m-%dT%H:%M:%S")
        for zone in (None, _machine_zone()):
            for fold in (0, 1):
                yield told.replace(tzinfo=zone, fold=fold).timestamp()


def _machine_zone() -> tzinfo:
    with contextlib.suppress(OSError, ValueError), Path("/etc/localtime").open("rb") as file:
        return ZoneInfo.from_file(file)
    return UTC


def _tail(output: int) -> bytes:
    """Return the end of an open file, as far as another process has written there.

    On a filesystem that does not answer, nothing: no job is held for it.
    """
    # Its own standard streams are of no use to the child that reads.
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


def _as_slurm_says(environ: Mapping[str, str]) -> str:
    client = Client(environ, patience_s=0.0, deadline_s=_PATIENCE_S)
    with contextlib.suppress(SlurmError):
        return of_states(client.job(name_in_slurm(environ)).states)
    return ""


def of_states(states: Collection[str]) -> str:
    """Return what became of a job in these states of Slurm's; empty where it ended by itself."""
    return next((text for state, text in _STATES.items() if state in states), "")
