# SPDX-License-Identifier: Apache-2.0
"""What is read from Slurm, and the reader that goes through scontrol.

A reader gets a way to run a command from its owner, which knows how long to wait and whether to
ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from slurm_health.records.errors import SlurmCommandError, SlurmError, UnknownJob
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.parsing import Job, JobId, Node, job_fields, job_of, node_of

Run = Callable[[Sequence[str]], str]
# Slurm's own words, which its commands and its library share.
_UNKNOWN_JOB = "Invalid job id specified"


class Reads(Protocol):
    """What is asked of Slurm. An empty list of names means every node."""

    def job(self, job_id: JobId) -> Job:
        """Read one job.

        Raises:
            UnknownJob: Slurm does not know it, or no longer.
            SlurmError: Slurm does not answer.
        """
        ...

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all, in one call.

        Raises:
            SlurmError: Slurm does not know one of them, does not answer, or answers nonsense.
        """
        ...


class CommandReads:
    """Reads through scontrol."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def job(self, job_id: JobId) -> Job:
        """Read one job."""
        try:
            text = self._run(["scontrol", "show", "job", "-o", str(job_id)])
        except SlurmCommandError as err:
            if knows_no_job(err):
                raise UnknownJob(job_id) from err
            raise
        return job_of(job_id, job_fields(job_id, text))

    def nodes(self, names: Sequence[str]) -> dict[str, Node]:
        """Read some nodes, or all, in one call."""
        which = ["node", "-o", fold(names)] if names else ["nodes", "-o"]
        text = self._run(["scontrol", "show", *which])
        found = {node.name: node for line in text.splitlines() if (node := node_of(line.strip()))}
        missing = [name for name in names if name not in found] if names else []
        if not found or missing:
            wanted = f"nodes {', '.join(missing)}" if missing else "nodes"
            raise SlurmError(f"scontrol show {which[0]} answered {text[:80]!r}, expected {wanted}")
        return found


def knows_no_job(err: SlurmCommandError) -> bool:
    """Tell whether Slurm refused because it does not know the job."""
    return _UNKNOWN_JOB in err.stderr
