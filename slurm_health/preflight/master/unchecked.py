# SPDX-License-Identifier: Apache-2.0
"""End a check that never got to measure: its options, its journal or Slurm stood in its way.

There may be no journal yet, or one whose filesystem hangs: a child writes it, within a limit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_health.preflight.acting.unchecked import comment_on_job
from slurm_health.preflight.decide import unchecked
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.preflight.master.run_check import run_started
from slurm_health.records.allocation import from_environ, name_in_slurm
from slurm_health.records.records import JobOutcome, Unchecked
from slurm_health.system import journal
from slurm_health.system.killable import Answered, Hung, run_one

log = logging.getLogger(__name__)
WRITE_S = 10.0
Tell = Callable[[JobOutcome, Path | str], None]


def conclude(
    problem: Unchecked,
    choice: OnUnchecked,
    *,
    root: Path | None,
    run_id: str,
    script: str,
    environ: Mapping[str, str],
    tell: Tell,
) -> JobOutcome:
    """Record why the nodes could not be checked; return and tell what the user chose for that.

    `root` is the directory of all journals, None if it is the journal that cannot be used. The
    job's comment says it then, and if nothing can be written.
    """
    outcome = unchecked.outcome(problem, choice)

    def write() -> bytes:
        """Append to the journal of this check, an existing one or a new one."""
        assert root is not None
        wanted = run_started(
            from_environ(environ), environ, run_id=run_id, script=script, settings={}
        )
        directory, begun = journal.directory_of_failed_check(root, wanted)
        journal.create(directory, [journal.MASTER])
        if wanted.array:
            journal.link_array_task(root, wanted)
        begin = [wanted] if begun is wanted else []
        journal.Writer(directory, journal.MASTER, time.time).append(*begin, problem, outcome)
        return os.fsencode(directory)

    directory = ""
    if root is not None:
        match run_one(write, WRITE_S):
            case Answered(data=data):
                directory = os.fsdecode(data)
            case Hung():
                log.warning("%s: it did not answer within %g s", root, WRITE_S)
            case failed:
                log.warning("%s: %s", root, failed.reason)
    if not directory and (job := name_in_slurm(environ)):
        comment_on_job(problem, job, environ)
    tell(outcome, directory)
    return outcome
