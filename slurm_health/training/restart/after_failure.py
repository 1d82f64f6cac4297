# SPDX-License-Identifier: Apache-2.0
"""From a failed script to what becomes of the job: asked, decided, recorded, carried out."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from slurm_health.preflight.decide.after_failure import Next, Plan, plan
from slurm_health.preflight.master.check_settings import CheckSettings
from slurm_health.preflight.master.run_check import check_allocation, run_started
from slurm_health.records.allocation import Allocation
from slurm_health.records.errors import ExitCode
from slurm_health.records.nodeset import fold
from slurm_health.records.records import Disposition, Record, RunFinished, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.system.slurm.client import Client
from slurm_health.training.restart.evidence import FailedScript, failure_of

_PATIENCE_S = 30.0  # for a slurmctld that is being restarted


def after_failure(
    failed: FailedScript,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
    *,
    less_checked: str = "",
) -> RunFinished:
    """Decide what follows a failed script, and do it; `settings` are those of a check after it.

    `less_checked` says why that check is quick where its user asked for another, else empty.

    `settings.tell` is told how it ends, as by a check. To PROCEED is to start the script again, on
    the nodes that it says; to STOP, to end the job as the script ended.

    Raises:
        SlurmError: Slurm does not answer.
        JournalError: the journal cannot be used; nothing is done unrecorded.
    """
    if not failed.nodes:
        failed = replace(failed, nodes=allocation.nodes)
    job = allocation.array or str(allocation.job_id)
    client = Client(environ, patience_s=_PATIENCE_S)
    chosen = plan(failure_of(failed, job, client, settings.policy))
    journal.Writer(failed.directory, journal.RESTART, time.time).append(
        chosen.recorded(restart=failed.restart, max_restarts=failed.max_restarts)
    )
    match chosen.next:
        case Next.STOP:
            finished = RunFinished(
                disposition=Disposition.STOP, exit_code=ExitCode.BAD_NODES, reason=chosen.reason
            )
            settings.tell(finished, failed.directory)
        case Next.RESTART:
            finished = RunFinished(
                disposition=Disposition.PROCEED,
                exit_code=ExitCode.HEALTHY,
                reason=chosen.reason,
                nodes=list(failed.nodes),
                spares=list(failed.spares),
            )
            settings.tell(finished, failed.directory)
        case Next.CHECK:
            finished = _checked(chosen, allocation, settings, environ, less_checked)
        case Next.LEAVE:
            finished = _left(failed, chosen, allocation, settings, environ)
    return finished


def _checked(
    chosen: Plan,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
    less_checked: str,
) -> RunFinished:
    """Check nodes, and act on the verdict and on what is known already."""
    _say(f"{chosen.reason}; checking {fold(chosen.check)} before the script is started again")
    if less_checked:
        _say(f"that check is quick: {less_checked}")
    tell = settings.tell

    def tell_nodes(finished: RunFinished, directory: Path) -> None:
        if not finished.nodes:  # all that were checked, which may be fewer than Slurm once gave
            finished = msgspec.structs.replace(finished, nodes=list(chosen.check))
        tell(finished, directory)

    return check_allocation(
        replace(allocation, nodes=chosen.check),
        replace(
            settings,
            at_fault=chosen.at_fault,
            policy=replace(settings.policy, last_choice=chosen.last_choice),
            run_id=secrets.token_hex(4),
            tell=tell_nodes,
        ),
        environ,
    ).finished


def _left(
    failed: FailedScript,
    chosen: Plan,
    allocation: Allocation,
    settings: CheckSettings,
    environ: Mapping[str, str],
) -> RunFinished:
    """Act on what is known of nodes as on the verdict of a check, which this records as one."""
    from slurm_health.preflight.acting.perform import Acting, act  # seldom needed

    all_nodes = (*failed.nodes, *failed.spares)
    wanted = run_started(
        replace(allocation, nodes=all_nodes),
        environ,
        run_id=secrets.token_hex(4),
        script=settings.script,
        submit_time_s=settings.submit_time_s,
        settings={"check": "none: the failure of the script shows it"},
    )
    directory, started = journal.directory_of_check(settings.journal_root, wanted)
    journal.create(directory, [journal.MASTER, *all_nodes])
    writer = journal.Writer(directory, journal.MASTER, time.time)
    verdict = VerdictReached(nodes=list(chosen.at_fault))
    # Of the others nothing new is known: they stand as the check before the script left them.
    names = {each.node for each in chosen.at_fault}
    well = [NodeVerdict(node=n, level=Level.HEALTHY) for n in all_nodes if n not in names]

    def append(record: Record) -> None:
        writer.append(record)
        if isinstance(record, RunFinished):
            settings.tell(record, directory)

    append(started)
    append(verdict)
    judged = msgspec.structs.replace(verdict, nodes=[*verdict.nodes, *well])
    acting = Acting.as_owner(started, directory, settings.policy, environ, append)
    finished = act(judged, acting)
    if not finished.disposition.leaves:  # else it is recorded before it is done
        append(finished)
    return finished


def _say(text: str) -> None:
    print(f"slurm-health: {text}", file=sys.stderr, flush=True)
