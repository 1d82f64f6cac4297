# SPDX-License-Identifier: Apache-2.0
"""Submit the job that starts another one again elsewhere, with no rights but its owner's.

A running job cannot exclude nodes from its own next attempt: Slurm takes that change only while
the job is pending, and the job's processes are dead by then. A plain requeue would start it
again two minutes later, perhaps on the same node. So before it requeues and holds itself, the
job submits a small helper job, which does the rest: see `release_elsewhere`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.records.errors import SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.command import clean_environ

log = logging.getLogger(__name__)

# The ten minutes of `release_elsewhere.PENDING_S`, and as long as its tries may take.
HELPER_MINUTES = 15
HELPER_MEMORY_MB = 100


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """All that the helper job is told.

    Args:
        job: the job, as Slurm's commands call it: `12`, or `12_3` in an array.
        attempt: the attempt of the job that ends.
        exclude: nodes that it must not come back to.
        comment: the job's own, which it gets back in the end.
        least: on how few nodes it runs; None: on all that it asks for.
        leave: the nodes that it leaves now, for `reason`: its owner may want to know.
    """

    job: str
    attempt: int
    exclude: tuple[str, ...]
    comment: str = ""
    least: int | None = None
    leave: tuple[str, ...] = ()
    reason: str = ""


def helper_name(job_id: int, attempt: int) -> str:
    """Return the name of the helper job of one attempt of a job."""
    return f"slurm-health-requeue-{job_id}-{attempt}"


@dataclass(frozen=True, kw_only=True)
class Helper:
    """How to submit the helper job of a run.

    `command` runs slurm-health in it; `directory` is the run's, for its log.
    """

    command: tuple[str, ...]
    directory: Path
    environ: Mapping[str, str]
    uid: int

    def ensure_submitted(
        self,
        client: Client,
        move: Move,
        *,
        job_id: int,
        placement: Mapping[str, str],
        nodes: int = 1,
        longest_min: int | None = None,
        avoid: Collection[str] = (),
    ) -> int:
        """Submit the helper of a job, or find the one an interrupted master submitted.

        `placement` is sbatch's options for a job that is to start where the job starts; on fewer
        than `nodes` none starts there, nor with a longer limit than `longest_min` minutes. `avoid`
        is nodes that the helper keeps off besides those that the job leaves.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        name = helper_name(job_id, move.attempt)
        present = client.jobs_named(name, self.uid)
        if present:
            return present[0]
        # One small task beside the job, not on a bad node; on several, Slurm wants one on each.
        arguments = [
            f"--job-name={name}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            f"--mem={HELPER_MEMORY_MB}M",
            f"--time={min(HELPER_MINUTES, longest_min or HELPER_MINUTES)}",
            "--no-requeue",
            f"--exclude={fold((*move.exclude, *avoid))}",
            f"--chdir={self.directory}",
            f"--output={self.directory / 'requeue.log'}",
            *(f"--{option}={value}" for option, value in placement.items()),
        ]
        encoded = msgspec.json.encode(move).decode()
        command = shlex.join([*self.command, f"--directory={self.directory}", f"--move={encoded}"])
        return client.submit(arguments, f"#!/bin/sh\nexec {command}\n", clean_environ(self.environ))

    def withdraw(self, client: Client, helper_id: int) -> None:
        """Cancel the helper after all. One that cannot be cancelled gives up by itself."""
        try:
            client.cancel(helper_id)
        except SlurmError as err:
            log.warning("could not cancel helper job %d: %s", helper_id, err)
