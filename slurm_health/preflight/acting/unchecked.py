# SPDX-License-Identifier: Apache-2.0
"""End a check that could not measure: in the journal, or on the job if the journal fails.

Slurm is asked for nothing if the journal says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.facts import own_comment, with_own_comment
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records import records
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.system.slurm.client import Client

log = logging.getLogger(__name__)


def end_unchecked(
    why: records.Unchecked,
    choice: OnUnchecked,
    *,
    job: str,
    client: Client,
    append: Callable[[records.Record], None],
    in_journal: bool = True,
) -> records.JobOutcome:
    """Record that the nodes could not be checked; return what becomes of the job.

    Args:
        why: the reason, and what to do.
        choice: what the user wants of such a job.
        job: what Slurm's commands call it; empty if nothing is to be done in Slurm.
        client: Slurm; a job that proceeds waits no longer than this client does.
        append: writes a record; a JournalError from it ends nothing.
        in_journal: whether a report will see there what is written.
    """
    outcome = unchecked.outcome(why, choice)
    works = in_journal
    for record in (why, outcome):
        try:
            append(record)
        except JournalError as err:
            if works:
                log.warning("%s", err)
            works = False
    if job and not works:
        try:
            own = own_comment(client.comment(job))  # unread, the job's own comment would be lost
            client.update_job(job, Comment=with_own_comment(unchecked.note(why), own))
        except SlurmError as err:
            log.warning("could not set the comment of job %s: %s", job, err)
    return outcome
