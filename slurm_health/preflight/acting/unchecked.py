# SPDX-License-Identifier: Apache-2.0
"""Say on a job that its nodes could not be checked, if its journal cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.facts import own_comment, with_own_comment
from slurm_health.records.errors import SlurmError
from slurm_health.records.records import Unchecked
from slurm_health.system.slurm.client import Client

log = logging.getLogger(__name__)
# A job that could start waits no longer for Slurm to take a comment.
_ASK_S = 10.0


def comment_on_job(why: Unchecked, job: str, environ: Mapping[str, str]) -> None:
    """Set the comment of a job, and keep its own at the end; log what stands in the way."""
    client = Client(environ, patience_s=0.0, deadline_s=_ASK_S)
    try:
        own = own_comment(client.comment(job))  # unread, the job's own comment would be lost
        client.update_job(job, Comment=with_own_comment(unchecked.note(why), own))
    except SlurmError as err:
        log.warning("could not set the comment of job %s: %s", job, err)
