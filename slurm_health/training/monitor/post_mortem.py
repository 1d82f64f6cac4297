# SPDX-License-Identifier: Apache-2.0
"""Why the script failed: collected, inferred, printed in the job's output, and recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from slurm_health.records.errors import JournalError
from slurm_health.records.script_records import (
    REQUEUED,
    SCRIPT_FAILED,
    Attribution,
    Diagnosed,
)
from slurm_health.report.sentences import lines_of
from slurm_health.system import journal
from slurm_health.training.diagnosis.diagnostician import CauseDiagnostician
from slurm_health.training.diagnosis.failure import FailureDiagnostician, observe_failure
from slurm_health.training.diagnosis.operators import OPERATORS
from slurm_health.training.framework import DataCollector, Diagnostician
from slurm_health.training.monitor import registry
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.containment import COLLECT_S, collect
from slurm_health.training.monitor.every_node import with_dumps
from slurm_health.training.monitor.job_collectors import JobOutput, MonitorFindings, SlurmWord
from slurm_health.training.monitor.registry import Registered

_TITLE_WIDTH = 8  # of the longest title, `evidence`


def hold(
    job: EndedJob,
    directory: Path | None,
    *,
    clock: Callable[[], float],
    used: Registered | None = None,
    collectors: Sequence[DataCollector] = (),
    limit_s: float = COLLECT_S,
    out: TextIO = sys.stderr,
) -> Diagnosed | None:
    """Find out why a script failed; say it, and then record it.

    Args:
        job: what has ended.
        directory: of the run in the journal, None where there is none.
        clock: seconds since the epoch.
        used: a site's collectors and operators; all that are registered if None.
        collectors: the built-in ones, all of them if empty.
        limit_s: how long the collectors may take.
        out: where it is printed: before it is recorded, because the journal may hang.

    Returns:
        The cause, None where nothing failed. Where that is nothing, that the job was requeued, or
        that a script that ended well was asked to, it is recorded and not printed: what the script
        itself says, and Slurm, is better.
    """
    well = job.end.well
    if well:  # nothing failed: it is only asked whether the job was ended
        used = Registered()
        asked = [rule for rule in OPERATORS if rule.name == "slurm-ended-it"]
        diagnostician: Diagnostician = CauseDiagnostician(observe_failure, asked)
        collectors = (JobOutput(job), SlurmWord(job), MonitorFindings(job))
    else:
        used = used or registry.registered()
        diagnostician = FailureDiagnostician(used.operators)
        collectors = (*(collectors or registry.after_failure(job)), *used.collectors)
    known = with_dumps(collect(collectors, job.environ, [job.end], limit_s=limit_s))
    known.failed.update(used.failed)
    cause = diagnostician.diagnose(data_manager=known).diagnosed
    if cause is None or (well and cause.cause == SCRIPT_FAILED):
        return None
    known_anyway = cause.attribution == Attribution.OUTSIDE if well else cause.cause == REQUEUED
    if not (known_anyway or cause.cause == SCRIPT_FAILED) or cause.failed:
        print(text_of(cause, job.end.script), file=out, flush=True)
    if directory is not None:
        try:
            journal.Writer(directory, journal.POST_MORTEM, clock).append(cause)
        except JournalError as err:
            print(f"slurm-health: the post-mortem is not recorded: {err}", file=out, flush=True)
    return cause


def text_of(cause: Diagnosed, script: str) -> str:
    """Return what is printed in the job's output."""
    name, outside = script or "the script", cause.attribution == Attribution.OUTSIDE
    lines = [f"post-mortem: {f'what ended {name}' if outside else f'why {name} failed'}"]
    lines += [f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in lines_of(cause)]
    return "\n".join(f"slurm-health: {line}" for line in lines)
