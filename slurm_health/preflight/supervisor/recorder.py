# SPDX-License-Identifier: Apache-2.0
"""The supervisor's records in the journal, and its lines on standard error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurm_health.records.errors import JournalError
from slurm_health.records.records import Record
from slurm_health.system import journal
from slurm_health.system.processes import fork
from slurm_health.system.telemetry import send_line

Clock = Callable[[], float]
_PREFIX = "slurm-health: "
_MOST_LOGGED_BYTES, _MOST_LOGGED_LINES = 10_000, 20


class ScriptRecorder:
    """Writes to the journal from a child: a filesystem that hangs must not hang us."""

    def __init__(self, directory: str, clock: Clock, wait_s: float) -> None:
        self._directory = directory
        self._clock = clock
        self._wait_s = wait_s
        self._child = 0

    def start(self, record: Record) -> None:
        """Begin to append a record."""
        if self._directory:
            with contextlib.suppress(OSError):
                self._child = fork(lambda: self._append(record))

    def ended(self) -> bool:
        """Return whether no record is being written."""
        if self._child and os.waitpid(self._child, os.WNOHANG)[0]:
            self._child = 0
        return self._child == 0

    def wait(self) -> bool:
        """Return whether the writer ended in time; kill it if not."""
        deadline = time.monotonic() + self._wait_s
        while not self.ended():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                os.kill(self._child, signal.SIGKILL)
                say(f"journal {self._directory}: its filesystem does not answer")
                return False
            signal.sigtimedwait({signal.SIGCHLD}, remaining)
        return True

    def _append(self, record: Record) -> int:
        """Append a record; a failure is only a line on standard error."""
        try:
            journal.Writer(Path(self._directory), journal.SUPERVISOR, self._clock).append(record)
        except JournalError as err:
            say(str(err))
        return 0


def say(text: str) -> None:
    """Print a line to the job's output."""
    with contextlib.suppress(OSError):  # its reader is gone
        print(f"{_PREFIX}{text}", file=sys.stderr, flush=True)


def tell(text: str, *, quiet: bool) -> None:
    """Print lines to the job's output, or to the machine's log if `quiet`."""
    for line in text.splitlines():
        if not quiet:
            say(line)
    if quiet:
        log_lines(text)


@contextlib.contextmanager
def to_machine_log() -> Iterator[None]:
    """While active, collect standard error, of children too, and log it on the machine at the end.

    Without a place for it, it is lost.
    """
    before = os.dup(2)
    try:
        collected = os.memfd_create("slurm-health")
    except OSError:
        collected = os.open(os.devnull, os.O_RDWR)
    os.dup2(collected, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        with os.fdopen(collected, "rb") as file, contextlib.suppress(OSError):
            file.seek(0)
            log_lines(file.read(_MOST_LOGGED_BYTES).decode(errors="replace"))


def log_lines(text: str) -> None:
    """Write the first lines of a text about this job to the machine's log."""
    job = os.environ.get("SLURM_JOB_ID", "")
    for line in text.splitlines()[:_MOST_LOGGED_LINES]:
        send_line("info", f"{_PREFIX}job {job}: {line.removeprefix(_PREFIX)}")
