# SPDX-License-Identifier: Apache-2.0
"""End a check that never got to measure: its options, its journal or Slurm stood in its way.

There may be no journal yet, or one whose filesystem hangs: each write is a child's, with a limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_health.preflight.acting.unchecked import end_unchecked
from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.preflight.master.run_check import run_started
from slurm_health.records.allocation import from_environ, name_in_slurm
from slurm_health.records.errors import AllocationError, JournalError
from slurm_health.records.records import JobOutcome, Record, RunStarted, Unchecked
from slurm_health.system import journal
from slurm_health.system.killable import Answered, Hung, run_one
from slurm_health.system.slurm.client import Client

WRITE_S = 10.0
# A job that could start waits no longer for Slurm to take a comment.
ASK_S = 10.0

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
    """Record why the nodes could not be checked, do what the user chose, and return how it ends.

    `root` is the directory of all journals, None where it is the journal that cannot be used: the
    job's comment says it then. `tell` is told how it ends before a hold ends this process.
    """
    late = _LateJournal(root, run_id, script, environ)

    def append(record: Record) -> None:
        try:
            late.append(record)
        finally:
            if isinstance(record, JobOutcome):
                tell(record, late.directory or "")

    client = Client(environ, patience_s=0.0, deadline_s=ASK_S)
    return end_unchecked(
        problem,
        choice,
        job=name_in_slurm(environ),
        client=client,
        append=append,
        in_journal=root is not None,
    )


class _LateJournal:
    """The journal of a check that has none open: found, or made, at the first record."""

    def __init__(
        self, root: Path | None, run_id: str, script: str, environ: Mapping[str, str]
    ) -> None:
        self._root = root
        self._run_id = run_id
        self._script = script
        self._environ = environ
        self.directory: Path | None = None

    def append(self, record: Record) -> None:
        """Append a record.

        Raises:
            JournalError: it cannot be written, or not in time.
        """
        if self._root is None:
            raise JournalError(Path(), "cannot be used")
        root = self._root

        def work() -> bytes:
            return os.fsencode(self._written(root, record))

        result = run_one(work, WRITE_S)
        if isinstance(result, Answered):
            self.directory = Path(os.fsdecode(result.data))
            return
        self._root = None  # another try would take as long
        why = f"did not answer within {WRITE_S:g} s" if isinstance(result, Hung) else result.reason
        raise JournalError(root, why)

    def _written(self, root: Path, record: Record) -> Path:
        """Append a record; return the run's directory."""
        if self.directory is None:
            directory, begin = self._found(root)
        else:
            directory, begin = self.directory, []
        writer = journal.Writer(directory, journal.MASTER, time.time)
        writer.append(*begin, record)
        return directory

    def _found(self, root: Path) -> tuple[Path, list[RunStarted]]:
        """Return the run's directory, and what it is to begin with."""
        try:
            allocation = from_environ(self._environ)
        except AllocationError as err:
            raise JournalError(root, str(err)) from err
        started = run_started(
            allocation, self._environ, run_id=self._run_id, script=self._script, settings={}
        )
        directory, begun = journal.directory_of_failed_check(root, started)
        journal.create(directory, [journal.MASTER])
        if started.array:
            journal.link_array_task(root, started)
        return directory, [] if begun is not started else [started]
