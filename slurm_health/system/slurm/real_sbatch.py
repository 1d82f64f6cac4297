# SPDX-License-Identifier: Apache-2.0
"""Which `sbatch` on PATH is Slurm's, where one that calls `slurm-health sbatch` stands before it.

Such a wrapper is how programs that call `sbatch` by its name reach us, and it would lead us back to
ourselves for ever. Whatever it is written in, it shows once it is called: what is called is noted
in the environment, and whoever finds a note of a process he descends from calls the next one.

And what Slurm's answers to `--test-only`: when and where a job would start.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.allocation import Estimate
from slurm_health.records.errors import SlurmError
from slurm_health.records.nodeset import expand
from slurm_health.system import proc

CALLED = "SLURM_HEALTH_SBATCH_CALLED"
_PROGRAM = b"\x7fELF"  # a compiled one: Slurm's
# The environment in which Slurm's commands print a time as seconds since the epoch.
PRINT_EPOCH = {"SLURM_TIME_FORMAT": "%s"}
# 26.05.5 says `at 1795383392 a using 1 processors`.
_START = re.compile(r"to start at (\d{1,18})(?: a)? using \d+ processors on nodes (\S+)")
_PREEMPTS = re.compile(r"Preempts: ")


@dataclass(frozen=True, kw_only=True)
class Sbatch:
    """The `sbatch` to call, with the environment to call it in.

    `path` is None where there is none. `led_back` says that we were called by an `sbatch` that we
    have called: what it was given has been through our hands, and is passed on as it is.
    """

    path: str | None
    environ: Mapping[str, str]
    led_back: bool


def find(environ: Mapping[str, str]) -> Sbatch:
    """Return the first `sbatch` on PATH that has not led back here."""
    called = _called(environ)
    rest = {name: value for name, value in environ.items() if name != CALLED}
    for directory in environ.get("PATH", "").split(os.pathsep):
        path = shutil.which("sbatch", path=directory or os.curdir)
        if path is not None and os.path.realpath(path) not in called:
            if not _is_compiled(path):
                rest[CALLED] = os.pathsep.join([_own_name(), *called, os.path.realpath(path)])
            return Sbatch(path=path, environ=rest, led_back=bool(called))
    return Sbatch(path=None, environ=rest, led_back=bool(called))


def _called(environ: Mapping[str, str]) -> list[str]:
    """Return what has been called already; nothing where the note is of a submission before."""
    caller, *paths = environ.get(CALLED, "").split(os.pathsep)
    return paths if caller in map(_name, proc.ancestors()) else []


def _own_name() -> str:
    return _name(next(proc.ancestors()))


def _name(process: proc.Stat) -> str:
    return f"{process.pid}.{process.start_ticks}"


def _is_compiled(path: str) -> bool:
    try:
        with Path(path).open("rb") as program:
            return program.read(len(_PROGRAM)) == _PROGRAM
    except OSError:
        return False


def estimate_of(text: str) -> Estimate:
    """Read the answer that was printed with `PRINT_EPOCH`.

    Raises:
        SlurmError: it is none.
    """
    found = _START.search(text)
    try:
        nodes = expand(found[2]) if found else ()
    except ValueError:
        nodes = ()
    if found is None or not nodes:
        said = " / ".join(text.split("\n")).strip(" /")[:200]
        raise SlurmError(f"sbatch --test-only answered {said!r}, expected a start time")
    return Estimate(
        start_s=float(found[1]), nodes=nodes, preempts=_PREEMPTS.search(text) is not None
    )
