# SPDX-License-Identifier: Apache-2.0
"""End a check that could not measure: in the journal, on the job where that fails, and in Slurm.

Slurm is asked for nothing where the job goes on and the journal says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from slurm_health.preflight.acting.job_facts import hold_obstacle
from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.decision import Ending
from slurm_health.preflight.decide.facts import own_comment, with_own_comment
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.records import records
from slurm_health.records.errors import JournalError, SlurmError
from slurm_health.system.slurm.client import Client

log = logging.getLogger(__name__)


def end_unchecked(
    found: records.Unchecked,
    choice: OnUnchecked,
    *,
    job: str,
    client: Client,
    append: Callable[[records.Record], None],
    in_journal: bool = True,
) -> records.RunFinished:
    """Record that the nodes could not be checked, and hold the job if that is asked; return how.

    Args:
        found: why, and what to do.
        choice: what the user wants of such a job.
        job: what Slurm's commands call it; empty where nothing is to be done in Slurm.
        client: Slurm; a job that proceeds waits no longer than this client does.
        append: writes a record; a JournalError from it ends nothing.
        in_journal: whether a report will find there what is written.
    """
    recorder = _Recorder(append, in_journal)
    recorder.append(found)
    if choice is OnUnchecked.HOLD:
        ending = _held(found, job, client, recorder)
    else:
        ending = unchecked.end(found, choice)
    if ending.disposition is not records.Disposition.HOLD:
        if job and not recorder.works:
            _annotate(client, job, unchecked.note(found))
        recorder.append(ending.recorded())
    return ending.recorded()


class _Recorder:
    """Writes to the journal as long as that works."""

    def __init__(self, append: Callable[[records.Record], None], works: bool) -> None:
        self._append = append
        self.works = works

    def append(self, record: records.Record) -> None:
        try:
            self._append(record)
        except JournalError as err:
            if self.works:
                log.warning("%s", err)
            self.works = False


def _held(found: records.Unchecked, job: str, client: Client, recorder: _Recorder) -> Ending:
    """Hold the job; return how it ends where it was held before, or cannot be held."""
    if not job:
        return unchecked.not_held(found, "it is not known to Slurm")
    try:
        comment = client.comment(job)
        if unchecked.was_held(comment):
            _set_comment(client, job, own_comment(comment))
            return unchecked.end(found, OnUnchecked.HOLD, released=True)
        obstacle = hold_obstacle(client.job(job))
    except SlurmError as err:
        return unchecked.not_held(found, str(err))
    if obstacle:
        return unchecked.not_held(found, obstacle)
    own = own_comment(comment)
    ending = unchecked.end(found, OnUnchecked.HOLD)
    recorder.append(
        records.ActionIntended(action=records.Action.HOLD, reason="--on-unchecked=hold")
    )
    _set_comment(client, job, with_own_comment(unchecked.holding_note(found, job), own))
    log.warning("holding job %s: %s", job, ending.reason)
    recorder.append(ending.recorded())
    try:
        client.requeue_held(job)
    except SlurmError as err:
        recorder.append(
            records.ActionDone(action=records.Action.HOLD, succeeded=False, detail=str(err))
        )
        _set_comment(client, job, own)
        return unchecked.not_held(found, str(err))
    return ending


def _annotate(client: Client, job: str, note: str) -> None:
    """Say it on the job, before its own comment."""
    try:
        own = own_comment(client.comment(job))
    except SlurmError as err:  # unread, the job's own comment would be lost
        log.warning("could not read the comment of job %s: %s", job, err)
        return
    _set_comment(client, job, with_own_comment(note, own))


def _set_comment(client: Client, job: str, text: str) -> None:
    try:
        client.update_job(job, Comment=text)
    except SlurmError as err:
        log.warning("could not set the comment of job %s to %r: %s", job, text, err)
