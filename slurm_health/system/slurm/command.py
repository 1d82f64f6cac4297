# SPDX-License-Identifier: Apache-2.0
"""Run one Slurm command: an argument list, a deadline, and an error with all the facts.

And the command of a step beside the user's steps, which it neither delays nor takes resources from.

Programs that call `sbatch` reach us by an `sbatch` on PATH that calls `slurm-health sbatch`, and
calling it from here would never end. So a call is recorded in the environment, and a process that
descends from the recorded caller calls the next `sbatch` on PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_health.records.errors import (
    SlurmCommandError,
    SlurmCommandMissing,
    SlurmTimeoutError,
)
from slurm_health.records.nodeset import fold
from slurm_health.system import proc, processes

DEADLINE_S = 30.0
OWN_STEPS = "slurm-health-"
"""What the names of our own steps begin with; `srun slurm-health run` is a user's."""
# Variables that Slurm's commands read as options: of the surrounding job for srun and sbatch, and
# of the user for commands that show or cancel jobs, where they hide some or ask for confirmation.
_INHERITED = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_"),
    *("SQUEUE_", "SCANCEL_", "SCONTROL_", "SACCT_", "SINFO_"),
)
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT"})
CALLED = "SLURM_HEALTH_SBATCH_CALLED"
_PROGRAM = b"\x7fELF"  # a compiled one: Slurm's
# The environment in which Slurm's commands print a time as seconds since the epoch.
PRINT_EPOCH = {"SLURM_TIME_FORMAT": "%s"}


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without options of a job or its user for Slurm's commands."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_INHERITED)
    }


def run(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    stdin: bytes = b"",
    deadline_s: float = DEADLINE_S,
    directory: Path | None = None,
) -> str:
    """Run a command to its end and return its standard output.

    Raises:
        SlurmCommandMissing: it is not on the PATH.
        SlurmTimeoutError: it did not end in time; it was killed with its children.
        SlurmCommandError: it ended with a non-zero code.
    """
    if shutil.which(argv[0], path=environ.get("PATH")) is None:
        raise SlurmCommandMissing(argv[0])
    try:
        ended = processes.run(
            argv, environ=environ, stdin=stdin, deadline_s=deadline_s, directory=directory
        )
    except TimeoutError:
        raise SlurmTimeoutError(argv, deadline_s) from None
    if ended.returncode != 0:
        raise SlurmCommandError(argv, ended.returncode, ended.stderr.decode(errors="replace"))
    return ended.stdout.decode(errors="replace")


def step_argv(
    job_id: int, nodes: Sequence[str], options: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command that runs one task per node, with more options of srun.

    Counts are explicit, because a nested srun otherwise takes the surrounding job's. The step
    overlaps with others and needs no memory of its own, so it never delays a step of the user's.
    The end of one task leaves the others running.
    """
    count = len(nodes)
    return [
        "srun",
        f"--jobid={job_id}",
        f"--nodelist={fold(nodes)}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--overlap",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--wait=0",
        "--input=all",
        "--output=all",
        "--error=all",
        f"--job-name={OWN_STEPS}step",
        *options,
        *command,
    ]


@dataclass(frozen=True, kw_only=True)
class Sbatch:
    """The `sbatch` to call, with its environment.

    `path` is None without one. `led_back`: we were called by an `sbatch` that we have called. Its
    arguments are ours already, and are passed on unchanged.
    """

    path: str | None
    environ: Mapping[str, str]
    led_back: bool


def find_sbatch(environ: Mapping[str, str]) -> Sbatch:
    """Return the first `sbatch` on PATH that has not led back here."""
    ancestors = [f"{process.pid}.{process.start_ticks}" for process in proc.ancestors()]
    caller, *called = environ.get(CALLED, "").split(os.pathsep)
    if caller not in ancestors:  # the record of an earlier submission
        called = []
    rest = {name: value for name, value in environ.items() if name != CALLED}
    for directory in environ.get("PATH", "").split(os.pathsep):
        path = shutil.which("sbatch", path=directory or os.curdir)
        if path is None or os.path.realpath(path) in called:
            continue
        head = b""
        with contextlib.suppress(OSError), Path(path).open("rb") as program:
            head = program.read(len(_PROGRAM))
        if head != _PROGRAM:
            rest[CALLED] = os.pathsep.join([ancestors[0], *called, os.path.realpath(path)])
        return Sbatch(path=path, environ=rest, led_back=bool(called))
    return Sbatch(path=None, environ=rest, led_back=bool(called))
