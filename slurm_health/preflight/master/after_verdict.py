# SPDX-License-Identifier: Apache-2.0
"""What becomes of the job once the verdict stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from slurm_health.preflight.acting.perform import Acting, act
from slurm_health.preflight.acting.unchecked import comment_on_job
from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.decide import exit_code
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.master import Master
from slurm_health.records import records
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold


def conclude(
    verdict: records.VerdictReached,
    master: Master,
    started: records.RunStarted,
    directory: Path,
    settings: CheckSettings,
    environ: Mapping[str, str],
) -> records.JobOutcome:
    """Act on a verdict, unless an earlier master has or the job is over; record how the run ends.

    Args:
        verdict: what was found.
        master: who found it.
        started: the first record of the check.
        directory: its journal.
        settings: what it was told.
        environ: its environment.

    Raises:
        JournalError: an intent or a result cannot be recorded; nothing is done unrecorded.
    """
    before = master.state.finished
    if before is not None and before.disposition is not records.Disposition.REQUEUE:
        return before  # acted on to the end, and only the answer was lost

    def append(record: records.Record) -> None:
        master.append(record)
        if isinstance(record, records.JobOutcome):
            settings.tell(record, directory)

    agents = master.state.agents
    blind = [name for name, node in agents.items() if node.no_journal]
    if over := [node.failed for node in agents.values() if node.job_ended]:
        # Cancelled, or its prolog failed. Slurm ends the batch step of such a job, but not always
        # before the check is done.
        job = started.slurm_name
        finished = records.JobOutcome(
            disposition=records.Disposition.STOP,
            exit_code=ExitCode.UNAVAILABLE,
            reason=f"Slurm has ended it already ({over[0]}); sacct -j {job}, or scontrol show job"
            f" {job} for some minutes, may say why",
        )
    elif blind:
        why = records.Unchecked(
            reason=f"the journal {directory} cannot be used from {fold(blind)}",
            remedy="name a directory on a filesystem that all nodes share with --journal or"
            " SLURM_HEALTH_JOURNAL",
        )
        append(why)
        finished = unchecked.outcome(why, settings.spec.on_unchecked)
        if settings.act:
            comment_on_job(why, started.slurm_name, environ)
    elif settings.act:
        if settings.at_fault:
            verdict = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *settings.at_fault])
            append(verdict)
        acting = Acting(
            started=started,
            directory=directory,
            policy=settings.policy,
            environ=environ,
            append=append,
        )
        finished = act(verdict, acting)
    else:
        finished = records.JobOutcome(
            disposition=records.Disposition.PROCEED,
            exit_code=exit_code(verdict),
            reason="only checked",
        )
    master.finish(finished)
    return finished
