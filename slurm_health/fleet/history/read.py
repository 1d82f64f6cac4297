# SPDX-License-Identifier: Apache-2.0
"""What the checks of one job say of their nodes, from the job's journal. Reads files only.

Journals of other users are read as `report` reads them: no link is followed, nothing is opened that
its owner has not alone, and nothing in them is run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from statistics import median

import msgspec

from slurm_health.fleet.standing.observation import (
    MOST_VALUE,
    NODE_NAME,
    CheckSeen,
    Figure,
    JobSeen,
    observations,
    shown,
    without_job_end,
)
from slurm_health.records.errors import JournalError
from slurm_health.records.record_codec import Entry
from slurm_health.records.records import Record, RunFinished, RunStarted, Sampled, VerdictReached
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.records.text import cut, one_line
from slurm_health.report.measured import figures_of
from slurm_health.system import journal

# A post-mortem, a requeue or a release by hand may still add to a journal that looks complete.
_SETTLED_S = 24 * 3600.0
# What is not complete after so long never will be: longer than Slurm jobs run.
_ABANDONED_S = 60 * 24 * 3600.0
_MOST_NODES = 64 * 1024  # as Slurm's node lists
_MOST_SAID = 500
# Of a job's runs the last ones: no job has as many, and its owner may make any number.
MOST_RUNS = 1000


@dataclass(frozen=True, kw_only=True)
class _Run:
    check: CheckSeen | None
    over: bool
    damaged: bool = False


def stamp_of(root: Path, cluster: str, job: str) -> str:
    """Return what changes with a job's journal.

    Raises:
        OSError: it cannot be read, or is refused.
    """
    return _stamp_and_time(root, cluster, job)[0]


def _stamp_and_time(root: Path, cluster: str, job: str) -> tuple[str, float]:
    """Return what changes with a job's journal, and when that was written last.

    Raises:
        OSError: it cannot be read, or is refused.
    """
    parts, newest_s = [], 0.0
    for directory in journal.runs_of(root, cluster, job)[-MOST_RUNS:]:
        with journal.opened(directory, None) as run:
            for writer in (journal.MASTER, journal.SUPERVISOR, journal.POST_MORTEM):
                name = journal.path_of(directory, writer).name
                try:
                    found = os.stat(name, dir_fd=run, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                newest_s = max(newest_s, found.st_mtime)
                parts.append(f"{directory.name}/{writer}:{found.st_size}")
    # Its length is limited: a job may have a thousand runs, and what keeps it holds 64 kB.
    return sha256(" ".join(parts).encode()).hexdigest(), newest_s


def read_job(root: Path, cluster: str, job: str, *, most_bytes: int | None = None) -> JobSeen:
    """Return what the checks of a job say of their nodes.

    With `most_bytes` no more than that is read of all its runs together.

    Raises:
        OSError: the job's directory cannot be read, or is refused.
    """
    stamp, newest_s = _stamp_and_time(root, cluster, job)
    uid = journal.job_directory(root, cluster, job).lstat().st_uid
    runs, troubles = [], []
    budget = _Budget(most_bytes)
    listed = journal.runs_of(root, cluster, job)
    if len(listed) > MOST_RUNS:
        troubles.append(f"it has more than {MOST_RUNS} runs: earlier ones are not read")
    for directory in listed[-MOST_RUNS:]:
        try:
            runs.append(_read_run(directory, budget))
        except (JournalError, OSError) as err:
            troubles.append(str(err))
    if any(run.damaged for run in runs):
        troubles.append("it has damaged lines, which count nowhere")
    over = bool(runs) and runs[-1].over
    return JobSeen(
        uid=uid,
        stamp=stamp,
        final_s=newest_s + (_SETTLED_S if over else _ABANDONED_S),
        checks=tuple(run.check for run in runs if run.check),
        trouble=cut(one_line("; ".join(troubles)), _MOST_SAID),
    )


class _Budget:
    """How many bytes of a job may be read still, None for all."""

    def __init__(self, most_bytes: int | None) -> None:
        self._most_bytes = self._left_bytes = most_bytes

    def spend(self, data: bytes) -> bytes:
        """Return the data, if there is room for it.

        Raises:
            OSError: there is none.
        """
        if self._left_bytes is not None:
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise OSError(errno.EFBIG, f"it has more than {self._most_bytes} bytes")
        return data


def _read_run(directory: Path, budget: _Budget) -> _Run:
    with journal.opened(directory, None) as run:
        damaged = 0

        def read(writer: str) -> list[Entry]:
            nonlocal damaged
            reader = journal.Reader(directory, writer, of_anybody=True)
            found = reader.take(budget.spend(reader.fetch(run)))
            damaged += reader.damaged
            return found

        master = read(journal.MASTER)
        start = next((each for each in master if isinstance(each.record, RunStarted)), None)
        if start is None or not isinstance(start.record, RunStarted):
            return _Run(check=None, over=False, damaged=damaged > 0)
        records = _records(master)
        listed = dict.fromkeys(start.record.nodes[:_MOST_NODES])
        names = [name for name in listed if NODE_NAME.fullmatch(name)]
        nodes = {name: _records(read(name)) for name in names}
        script = _records(read(journal.SUPERVISOR))
        written_s = os.stat(journal.path_of(directory, journal.MASTER).name, dir_fd=run).st_mtime
        seen = observations(
            without_job_end(master),
            nodes,
            _records(read(journal.POST_MORTEM)),
            _figures(records, nodes.values()),
        )
    # Its owner wrote it: no check begins after what is said of it was written.
    began_s = min(start.time_s, written_s)
    ran_s = _ran_s(script, names)
    check = CheckSeen(
        label=directory.name,
        time_s=began_s,
        seen=tuple(msgspec.structs.replace(each, ran_s=ran_s.get(each.node, 0.0)) for each in seen),
    )
    return _Run(check=check, over=_is_over(records, script), damaged=damaged > 0)


def _ran_s(script: Sequence[Record], nodes: Collection[str]) -> dict[str, float]:
    """Return how long the script ran on each node; what is not known to have ended, not at all."""
    found: dict[str, float] = {}
    on: Collection[str] = ()
    for record in script:
        match record:
            case ScriptStarted(nodes=some):
                on = some or nodes
            case ScriptEnded(duration_s=lasted_s) if isfinite(lasted_s):
                for node in on:
                    ran_s = found.get(node, 0.0) + max(0.0, lasted_s)
                    found[node] = min(ran_s, _ABANDONED_S)
                on = ()
    return found


def _figures(
    master: Sequence[Record], nodes: Iterable[Sequence[Record]]
) -> dict[str, list[Figure]]:
    """Return what `report` shows of each node, of each figure the median.

    Of the several groups that a node was in, that tells about the node and not about a partner.
    """
    samples = [each for own in nodes for each in own if isinstance(each, Sampled)]
    verdicts = [each for each in master if isinstance(each, VerdictReached)]
    by_node = figures_of(samples, verdicts[-1] if verdicts else None).by_node
    return {
        node: [
            Figure("", shown(f"{each.probe} {each.unit}"), median(values))
            for each in figures
            if (values := [value for value in each.values if value < MOST_VALUE])
        ]
        for node, figures in by_node.items()
    }


def _is_over(master: Sequence[Record], script: Sequence[Record]) -> bool:
    finished = [each for each in master if isinstance(each, RunFinished)]
    if not finished or finished[-1].disposition.leaves:
        return False
    began = any(isinstance(each, ScriptStarted) for each in script)
    return not began or any(isinstance(each, ScriptEnded) for each in script)


def _records(entries: Sequence[Entry]) -> list[Record]:
    return [each.record for each in entries if each.record is not None]
