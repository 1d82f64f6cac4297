# SPDX-License-Identifier: Apache-2.0
"""Run one Slurm command: an argument list, a deadline, and an error with all the facts.

And the command of a step beside the user's steps, which it neither delays nor takes from.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurm_health.records.errors import SlurmCommandError, SlurmCommandMissing, SlurmTimeoutError
from slurm_health.records.nodeset import fold
from slurm_health.system import processes

DEADLINE_S = 30.0
OWN_STEPS = "slurm-health-"
"""What the names of our own steps begin with; `srun slurm-health run` is a user's."""
# What srun, sbatch and scontrol read as options when it is inherited from the surrounding job.
_INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_")
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_TIME_FORMAT"})


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what the surrounding job would impose on a Slurm command."""
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
    with_stderr: bool = False,
) -> str:
    """Run a command to its end and return its standard output, errors too where wanted.

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
    said = ended.stdout + (ended.stderr if with_stderr else b"")
    return said.decode(errors="replace")


def step_argv(
    job_id: int, nodes: Sequence[str], options: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command that runs one task on each node, with more options of srun.

    Counts are explicit, because a nested srun otherwise takes the surrounding job's; the step
    overlaps with others and takes no memory of its own, so that it never delays a step of the
    user's; one task that ends leaves the others running.
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
