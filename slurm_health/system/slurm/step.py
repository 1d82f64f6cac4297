# SPDX-License-Identifier: Apache-2.0
"""The srun command of a step beside the user's steps, which it neither delays nor takes from."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_health.records.nodeset import fold


def beside_argv(
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
        "--job-name=slurm-health",
        *options,
        *command,
    ]
