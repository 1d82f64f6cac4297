# SPDX-License-Identifier: Apache-2.0
"""What becomes of the job once the verdict stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight import config
from slurm_health.preflight.decide.decide import exit_code
from slurm_health.preflight.decide.policy import Policy
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.records import records
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold
from slurm_health.system.processes import own_command
from slurm_health.system.slurm.client import Client


def conclude(
    verdict: records.VerdictReached,
    blind: Sequence[str],
    started: records.RunStarted,
    directory: Path,
    settings: CheckSettings,
    environ: Mapping[str, str],
    append: Callable[[records.Record], None],
) -> records.RunFinished:
    """Act on the verdict if told to.

    Args:
        verdict: what was found.
        blind: the nodes that do not see the journal.
        started: the first record of the check.
        directory: its journal.
        settings: what it was told.
        environ: its environment.
        append: writes a record of the master's.
    """

    def append_and_tell(record: records.Record) -> None:
        append(record)
        if isinstance(record, records.RunFinished):
            settings.tell(record, directory)

    if blind:  # what was found is not worth acting on
        from slurm_health.preflight.acting.unchecked import end_unchecked  # seldom needed

        return end_unchecked(
            _not_shared(directory, blind),
            settings.on_unchecked,
            job=started.slurm_name if settings.act else "",
            client=Client(environ, patience_s=0.0),
            append=append_and_tell,
            in_journal=False,
        )
    if not settings.act:
        return records.RunFinished(
            disposition=records.Disposition.PROCEED,
            exit_code=exit_code(verdict),
            reason="only checked",
        )
    if settings.at_fault:
        verdict = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *settings.at_fault])
        append_and_tell(verdict)
    return act_on(verdict, started, directory, settings.policy, environ, append_and_tell)


def act_on(
    verdict: records.VerdictReached,
    started: records.RunStarted,
    directory: Path,
    policy: Policy,
    environ: Mapping[str, str],
    append: Callable[[records.Record], None],
) -> records.RunFinished:
    """Act on a verdict as the user whose job this is; return how the run ends.

    Raises:
        JournalError: an intent or a result cannot be recorded; nothing is done unrecorded.
    """
    from slurm_health.preflight.acting.perform import Acting, act
    from slurm_health.preflight.acting.requeue_helper import Helper

    helper = Helper(
        command=own_command("requeue-helper"),
        directory=directory,
        environ=environ,
        uid=os.getuid(),
    )
    return act(
        verdict,
        Acting(
            started=started,
            directory=directory,
            policy=policy,
            client=Client(environ),
            uid=os.getuid(),
            append=append,
            helper=helper,
            site_file=config.site_file(environ),
        ),
    )


def job_ended(said: str, job: str, *, accounts: bool | None) -> records.RunFinished:
    """End the run of a job that was cancelled, or failed its prolog: its script is not started.

    Slurm ends the batch step of such a job, but not always before the check is done. `accounts`
    says whether sacct can be asked, None where that is unknown.
    """
    look = {
        None: "squeue, or sacct where Slurm keeps accounts, may say why",
        True: f"sacct -j {job} may say why",
        False: f"scontrol show job {job} may say why, for some minutes",
    }[accounts]
    return records.RunFinished(
        disposition=records.Disposition.STOP,
        exit_code=ExitCode.UNAVAILABLE,
        reason=f"Slurm has ended it already ({said}); {look}",
    )


def _not_shared(directory: Path, blind: Sequence[str]) -> records.Unchecked:
    return records.Unchecked(
        reason=f"the journal {directory} cannot be used from {fold(blind)}",
        remedy="name a directory on a filesystem that all nodes share with --journal or"
        " SLURM_HEALTH_JOURNAL",
    )
