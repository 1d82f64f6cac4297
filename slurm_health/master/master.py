# SPDX-License-Identifier: Apache-2.0
"""The loop of one check: read the journal, ask the session what to do, do it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock, Timeout

from slurm_health import journal
from slurm_health.core.expectations import Expectation
from slurm_health.core.nodeset import fold
from slurm_health.core.record_codec import Entry
from slurm_health.core.records import (
    AgentsLaunched,
    AgentsLost,
    GroupAborted,
    MasterResumed,
    MasterWaits,
    NodesAdmitted,
    Record,
    RoundStarted,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.core.session.phase_runner import MakeLocalizer
from slurm_health.core.session.phases import Phase
from slurm_health.core.session.session import Append, Conclude, Launch, Limits, Session, Wait
from slurm_health.errors import JournalBusy, JournalError
from slurm_health.master.launcher import Launcher

log = logging.getLogger(__name__)

# Reading every node's file and every agent reading the master's are the whole load of a run on
# the filesystem's metadata server; together they stay below this.
OPENS_PER_S = 2000.0
SHORTEST_POLL_S = 0.03
# A master that waits says so this often. Whoever hears nothing of it for `SILENCE_S` takes it for
# dead: that is longer than it takes to load numpy from a cold filesystem, its longest pause.
HEARTBEAT_S = 10.0
SILENCE_S = 60.0


def poll_interval_s(nodes: int) -> float:
    """Return how often each file of a run of this size is read."""
    return max(SHORTEST_POLL_S, 2 * nodes / OPENS_PER_S)


class Master:
    """Runs one check of one run directory. Nobody else may be at it."""

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str],
        launcher: Launcher,
        *,
        limits: Limits,
        phases: Sequence[Phase],
        make_localizer: MakeLocalizer,
        expectations: Mapping[str, Expectation] = MappingProxyType({}),
        localize_options: Mapping[str, object] = MappingProxyType({}),
        progress: Callable[[str], None] | None = None,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.session = Session(
            nodes, make_localizer, limits, phases, expectations, localize_options
        )
        self._directory = directory
        self._launcher = launcher
        self._clock = clock
        self._sleep = sleep
        self._poll_s = poll_interval_s(len(nodes))
        self._lock = FileLock(directory / "master.lock")
        self._readers = {node: journal.Reader(directory, node) for node in nodes}
        self._said = ""
        self._wrote_s = 0.0
        self._waiting_since_s = 0.0
        self._progress = progress
        self._alive = alive
        self._writer: journal.Writer | None = None

    def open(self, started: RunStarted) -> None:
        """Begin the run, or take over the one a dead master left.

        Raises:
            JournalBusy: another master is at it.
            JournalError: the journal cannot be read or written.
        """
        journal.create(self._directory, [journal.MASTER, *self.session.state.nodes])
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise JournalBusy(self._directory) from None
        except OSError as err:
            # A lock saves work, the truth does not rest on it.
            log.warning("cannot lock %s: %s; going on without", self._directory, err.strerror)
        self._read_nodes()
        for entry in journal.read_all(self._directory, journal.MASTER):
            self.session.state.fold(entry)
        self._writer = journal.Writer(self._directory, journal.MASTER, self._clock)
        if self.session.state.started is None:
            self.append(started)
        elif self.session.state.verdict is None:
            log.info("taking over a check that was interrupted")
            self.append(MasterResumed(pid=os.getpid()))

    def run(self) -> VerdictReached:
        """Run the check to its verdict.

        Raises:
            JournalError: the journal cannot be read or written.
        """
        while True:
            self._alive()
            self._read_nodes()
            for lost in self._launcher.poll():
                self._note_loss(lost)
            step = self.session.next_step(self._clock())
            match step:
                case Append(record=record):
                    self.append(record)
                case Launch(record=record):
                    self.append(record)
                    self._launcher.start(record.launch, record.nodes)
                case Wait(until_s=until_s, reason=reason):
                    self._say(reason)
                    if abs(self._clock() - self._wrote_s) >= HEARTBEAT_S:  # clocks are set back
                        self.append(MasterWaits(reason=reason))
                    self._sleep(min(self._poll_s, max(0.001, until_s - self._clock())))
                case Conclude():
                    assert self.session.state.verdict is not None
                    return self.session.state.verdict

    def finish(self, finished: RunFinished) -> None:
        """Write the end of the run, unless it stands there as it is.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self.session.state.finished != finished:
            self.append(finished)

    def close(self) -> None:
        """End whatever agents are left, and give the run up."""
        self._launcher.stop(0.0)
        self._lock.release()

    def append(self, record: Record) -> None:
        """Write a record of the master's and take it in.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self._writer is None:
            raise JournalError(self._directory, "is not open")
        now_s = self._wrote_s = self._clock()
        self._writer.append(record)
        self._alive()
        self.session.state.fold(Entry(id="", time_s=now_s, kind="", record=record))
        _log_record(record)

    def _read_nodes(self) -> None:
        for reader in self._readers.values():
            for entry in reader.read_new():
                self.session.state.fold(entry)

    def _note_loss(self, lost: AgentsLost) -> None:
        if self.session.state.verdict is None:
            self.append(lost)

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._waiting_since_s = self._clock()
            log.debug("waiting for %s", reason)
        if self._progress is not None:
            waited_s = self._clock() - self._waiting_since_s
            self._progress(f"waiting for {reason}, {waited_s:.0f} s")


def _log_record(record: Record) -> None:
    match record:
        case AgentsLaunched(nodes=nodes, launch=launch):
            log.log(logging.INFO if launch else logging.DEBUG, "starting agents on %s", fold(nodes))
        case AgentsLost(nodes=nodes, reason=reason):
            log.warning("node=%s agent lost: %s", fold(nodes), reason)
        case NodesAdmitted(nodes=nodes):
            log.debug("measuring %s", fold(nodes))
        case RoundStarted() as started:
            log.info("round %d: %s", started.round, _round_text(started))
        case GroupAborted(round=index, group=group, reason=reason):
            log.info("round %d: %s stopped: %s", index, fold(group), reason)
        case _:
            pass


def _round_text(started: RoundStarted) -> str:
    """Say who does what in a round: `pairs n1-n2 n3-n4: matmul, allgather`."""
    if all(len(group) == 1 for group in started.groups):
        who = f"{fold(node for group in started.groups for node in group)} alone"
    else:
        who = " ".join(fold(group) for group in started.groups)
    return f"{who}: {', '.join(probe.name for probe in started.probes)}"
