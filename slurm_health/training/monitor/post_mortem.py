# SPDX-License-Identifier: Apache-2.0
"""The post-mortem of a script: collect, infer, print in the job's output, record."""

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
from slurm_health.system import journal, owner
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
_TELL_S = 5.0  # within the supervisor's limit (POST_MORTEM_S), behind the collectors


def run_post_mortem(
    job: EndedJob,
    directory: Path | None,
    *,
    clock: Callable[[], float],
    used: Registered | None = None,
    collectors: Sequence[DataCollector] = (),
    limit_s: float = COLLECT_S,
    out: TextIO = sys.stderr,
) -> Diagnosed | None:
    """Infer why a script failed; print it, and then record it.

    Args:
        job: the job whose script has ended.
        directory: of the run in the journal, None without one.
        clock: seconds since the epoch.
        used: a site's collectors and operators; all registered ones if None.
        collectors: the built-in ones, all of them if empty.
        limit_s: the time limit of the collectors.
        out: the file for printing, which comes before the record, because the journal may hang.

    Returns:
        The cause, None if nothing failed. An unknown cause, a requeue, and the end of a script that
        ended well on request are recorded and not printed: the output of the script itself, and
        Slurm's, is better.
    """
    well = job.end.well
    if well:  # nothing failed: only whether the job was ended is of interest
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
    if not well and cause.attribution != Attribution.OUTSIDE:
        text = text_of(cause, job.end.script)
        owner.tell("failed", cause.description, text, job.environ, wait_s=_TELL_S)
    return cause


def text_of(cause: Diagnosed, script: str) -> str:
    """Return a cause as text for the job's output."""
    name, outside = script or "the script", cause.attribution == Attribution.OUTSIDE
    lines = [f"post-mortem: {f'what ended {name}' if outside else f'why {name} failed'}"]
    lines += [f"  {title:{_TITLE_WIDTH}}  {text}" for title, text in lines_of(cause)]
    return "\n".join(f"slurm-health: {line}" for line in lines)
