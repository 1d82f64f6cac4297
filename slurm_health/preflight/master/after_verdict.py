# SPDX-License-Identifier: Apache-2.0
"""What becomes of the job once the verdict stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.preflight.decide.decide import exit_code
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.master import Master
from slurm_health.records import records
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold
from slurm_health.system.slurm.client import Client


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
        return before  # acted on to the end, and only not heard: the job is as it says

    def append(record: records.Record) -> None:
        master.append(record)
        if isinstance(record, records.JobOutcome):
            settings.tell(record, directory)

    finished = _cut_short(master, started, directory, settings, environ, append)
    if finished is None and settings.act:
        finished = _acted_on(verdict, started, directory, settings, environ, append)
    if finished is None:
        finished = _only_checked(verdict)
    master.finish(finished)
    return finished


def _cut_short(
    master: Master,
    started: records.RunStarted,
    directory: Path,
    settings: CheckSettings,
    environ: Mapping[str, str],
    append: Callable[[records.Record], None],
) -> records.JobOutcome | None:
    """End a check of which what was found is not worth acting on; None for any other."""
    agents = master.state.agents
    over = [node.failed for node in agents.values() if node.job_ended]
    if over:
        accounts = Client(environ, patience_s=0.0).keeps_accounts()
        return job_ended(over[0], started.slurm_name, accounts=accounts)
    blind = [name for name, node in agents.items() if node.no_journal]
    if not blind:
        return None
    from slurm_health.preflight.acting.unchecked import end_unchecked  # seldom needed

    return end_unchecked(
        _not_shared(directory, blind),
        settings.spec.on_unchecked,
        job=started.slurm_name if settings.act else "",
        client=Client(environ, patience_s=0.0),
        append=append,
        in_journal=False,
    )


def _only_checked(verdict: records.VerdictReached) -> records.JobOutcome:
    return records.JobOutcome(
        disposition=records.Disposition.PROCEED,
        exit_code=exit_code(verdict),
        reason="only checked",
    )


def _acted_on(
    verdict: records.VerdictReached,
    started: records.RunStarted,
    directory: Path,
    settings: CheckSettings,
    environ: Mapping[str, str],
    append: Callable[[records.Record], None],
) -> records.JobOutcome:
    from slurm_health.preflight.acting.perform import Acting, act

    if settings.at_fault:
        verdict = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *settings.at_fault])
        append(verdict)
    return act(verdict, Acting.as_owner(started, directory, settings.policy, environ, append))


def job_ended(state: str, job: str, *, accounts: bool | None) -> records.JobOutcome:
    """End the run of a job that was cancelled, or failed its prolog: its script is not started.

    Slurm ends the batch step of such a job, but not always before the check is done. `accounts`
    says whether sacct can be asked, None where that is unknown.
    """
    look = {
        None: "squeue, or sacct where Slurm keeps accounts, may say why",
        True: f"sacct -j {job} may say why",
        False: f"scontrol show job {job} may say why, for some minutes",
    }[accounts]
    return records.JobOutcome(
        disposition=records.Disposition.STOP,
        exit_code=ExitCode.UNAVAILABLE,
        reason=f"Slurm has ended it already ({state}); {look}",
    )


def _not_shared(directory: Path, blind: Sequence[str]) -> records.Unchecked:
    return records.Unchecked(
        reason=f"the journal {directory} cannot be used from {fold(blind)}",
        remedy="name a directory on a filesystem that all nodes share with --journal or"
        " SLURM_HEALTH_JOURNAL",
    )
