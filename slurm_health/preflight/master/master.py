# SPDX-License-Identifier: Apache-2.0
"""The loop of one check: read the journal, ask the controller what to do, do it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slurm_health.preflight import orders
from slurm_health.preflight.master.check_log import end_text, log_record
from slurm_health.preflight.master.launcher import Launcher
from slurm_health.preflight.session.controller import Controller, Step, Wait
from slurm_health.records import records
from slurm_health.records.errors import JournalBusy, JournalError
from slurm_health.records.record_codec import Entry
from slurm_health.system import journal
from slurm_health.system.signals import signal_behind

log = logging.getLogger(__name__)

# Reading every node's file and every agent reading the master's are the whole load of a run on
# the filesystem's metadata server; together they stay below this.
OPENS_PER_S = 2000.0
SHORTEST_POLL_S = 0.03
# The share of it for files of nodes that the run does not wait for.
SWEEP_OPENS_PER_S = 200.0
SHORTEST_SWEEP_S = 5.0
# The longest sleep of a master whose nodes ring.
BELL_POLL_S = 1.0
# The wait for further rings after the first, and its steps: what follows goes through all nodes.
GATHER_S_PER_NODE = 20e-6
GATHER_STEP_S = 0.002
# What has arrived is taken in meanwhile, for this many nodes at a time: opening files, if that is
# needed, in threads pays off from there.
READ_TOGETHER = 2048
# A waiting master writes a record this often. Without one for `SILENCE_S` agents take it for dead:
# longer than it takes to load numpy from a cold filesystem, its longest pause.
HEARTBEAT_S = 10.0
SILENCE_S = 60.0


_NEW_OBJECTS = 5_000_000  # more than such a check makes, less than a machine has memory for


def poll_interval_s(nodes: int) -> float:
    """Return how often so many nodes' files are read, and as often the orders by as many agents."""
    return max(SHORTEST_POLL_S, 2 * nodes / OPENS_PER_S)


class Master:
    """Runs one check in one run directory, which it holds alone.

    Args:
        directory: that directory.
        controller: decides what to do; its state is what is known.
        launcher: starts the agents.
        progress: gets what the master waits for.
        alive: called as the check makes progress.
        load_ahead: called once the first agents are being started, which keeps them busy for long.
        clock: stamps the records, seconds since the epoch.
    """

    def __init__(
        self,
        directory: Path,
        controller: Controller,
        launcher: Launcher,
        *,
        progress: Callable[[str], None] | None = None,
        alive: Callable[[], None] = lambda: None,
        load_ahead: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._controller = controller
        self.state = controller.state
        nodes = self.state.nodes
        self._directory = directory
        self._launcher = launcher
        self._clock = clock
        self._sweep_s = max(SHORTEST_SWEEP_S, len(nodes) / SWEEP_OPENS_PER_S)
        self._swept_s = self._looked_s = clock()
        self._gather_s = GATHER_S_PER_NODE * len(nodes)
        self._rung: set[str] = set()  # since their files were read last
        self._ringing: set[str] = set()  # whose rings arrive, as far as is known
        self._lock: int | None = None
        self._readers = {node: journal.Reader(directory, node) for node in nodes}
        self._has_files = False
        self._said = ""
        self._told_s = 0.0
        self._waiting_since_s = 0.0
        self._progress = progress
        self._alive = alive
        self._load_ahead = load_ahead
        self._writer: journal.Writer | None = None
        self._orders: orders.OrderWriter | None = None

    @contextlib.contextmanager
    def led(
        self, started: records.RunStarted, job: Callable[[], str] = lambda: ""
    ) -> Iterator[records.VerdictReached]:
        """Run the check to its verdict, and give the run up after what is done about that.

        A signal that ends either is recorded; `job` tells what became of its job by then.

        Raises:
            JournalBusy: another master is at it.
            JournalError: the journal cannot be read or written.
        """
        try:
            self.open(started)
            yield self.run()
        except (KeyboardInterrupt, SystemExit) as end:
            self.note_end(end, job)
            raise
        finally:
            self.close()

    def open(self, started: records.RunStarted) -> None:
        """Begin the run, or take over one that was judged: then all that is left is to act.

        Raises:
            JournalBusy: another master is at it.
            JournalError: the journal cannot be read or written.
        """
        journal.create(self._directory, [journal.MASTER])
        try:
            self._lock = journal.lock(self._directory)
        except OSError as err:
            # A lock saves work, the truth does not rest on it.
            log.warning("cannot lock %s: %s; going on without", self._directory, err.strerror)
        else:
            if self._lock is None:
                raise JournalBusy(self._directory)
        for entry in journal.read_all(self._directory, journal.MASTER):
            self.state.fold(entry)
        self._writer = journal.Writer(self._directory, journal.MASTER, self._clock)
        if self.state.verdict is not None:
            log.info("acting on the verdict of a check that was interrupted")
            return
        self.append(started)
        self._orders = orders.OrderWriter(self._directory, started.run_id, self.state.nodes)

    def run(self) -> records.VerdictReached:
        """Run the check to its verdict.

        Raises:
            JournalError: the journal cannot be read or written.
        """
        with seldom_collected():
            return self._to_verdict()

    def _to_verdict(self) -> records.VerdictReached:
        while self.state.verdict is None:
            self._alive()
            self._read_news()
            if lost := self._launcher.poll():
                self.append(*lost)
            step = self._next_step()
            if isinstance(step, Wait):
                self._wait(step)
            else:
                self.append(*step)
                for record in step:
                    if isinstance(record, records.AgentsLaunched):
                        self._start(record)
        return self.state.verdict

    def _next_step(self) -> Step:
        """Return what to do now; what nodes have written, and not rung for, is read before."""
        step = self._controller.next_step(self._clock())
        if isinstance(step, Wait) or isinstance(step[0], records.AgentsLaunched):
            return step
        concerned = self.state.unreported()
        aborts = [record for record in step if isinstance(record, records.GroupAborted)]
        if stopped := {node for abort in aborts for node in abort.group}:
            concerned = [node for node in concerned if node in stopped]
        if self._read(concerned):
            step = self._controller.next_step(self._clock())
        return step

    def _start(self, launched: records.AgentsLaunched) -> None:
        self._launcher.start(launched.launch, launched.nodes)
        if not self._has_files:
            # Before they are looked for, which agents do that are quicker.
            journal.create(self._directory, self.state.nodes)
            self._has_files = True
            self._load_ahead()

    def _wait(self, step: Wait) -> None:
        self._say(step.reason)
        if abs(self._clock() - self._told_s) >= HEARTBEAT_S:  # clocks are set back
            self.append(records.MasterWaits(reason=step.reason))
        now_s = self._clock()
        mute = len(self._mute())
        look_s = self._looked_s + (poll_interval_s(mute) if mute else BELL_POLL_S) - now_s
        wait_s = max(0.001, min(look_s, BELL_POLL_S, step.until_s - now_s))
        if self._receive(wait_s):
            self._gather()

    def _receive(self, timeout_s: float) -> set[str]:
        """Wait for rings, and return the nodes of which all or a whole line has arrived."""
        rung = set()
        for node, begins, data in self._launcher.wait(timeout_s, GATHER_STEP_S):
            reader = self._readers[node]
            reader.receive(begins, data)
            if reader.gap or data.endswith(b"\n"):
                rung.add(node)
        self._rung |= rung
        return rung

    def _gather(self) -> None:
        """Let the others ring too, who are about as far: what follows goes through all nodes.

        What many have written by then is read meanwhile.
        """
        missing = set(self.state.awaited()) - self._rung
        until_s = self._clock() + self._gather_s
        while missing and (left_s := until_s - self._clock()) > 0.0:
            if len(self._rung) >= READ_TOGETHER:
                self._read_rung()
            missing -= self._receive(left_s)

    def _mute(self) -> list[str]:
        """Return the nodes that the run waits for and whose rings do not arrive."""
        if len(self._ringing) == len(self._readers):
            return []
        return [node for node in self.state.awaited() if node not in self._ringing]

    def finish(self, finished: records.JobOutcome) -> None:
        """Write the end of the run, unless it stands there as it is.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self.state.finished != finished:
            self.append(finished)

    def note_end(
        self, end: KeyboardInterrupt | SystemExit, job: Callable[[], str] = lambda: ""
    ) -> None:
        """Write which signal ends this master, unless the run is over; nothing where it cannot.

        `job` tells what became of its job, and is asked where the signal is not a person's here.
        """
        if self._writer is not None and self.state.finished is None:
            state = "" if isinstance(end, KeyboardInterrupt) else job()
            with contextlib.suppress(JournalError):
                self.append(records.MasterStopped(reason=signal_behind(end), job=state))

    def close(self) -> None:
        """End whatever agents are left, and give the run up."""
        self._launcher.stop(0.0)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, *new: records.Record) -> None:
        """Write records of the master's and take them in.

        Raises:
            JournalError: the journal cannot be written.
        """
        if self._writer is None:
            raise JournalError(self._directory, "is not open")
        now_s = self._clock()
        self._writer.append(*new)
        if self._orders is not None and self._orders.append(*new):
            self._told_s = now_s
            self._launcher.ring()
        self._alive()
        for record in new:
            if isinstance(record, records.RoundEnded) and log.isEnabledFor(logging.INFO):
                self._log_end_of(record)
            self.state.fold(Entry(id="", time_s=now_s, kind="", record=record))
            log_record(record)

    def _log_end_of(self, ended: records.RoundEnded) -> None:
        current = self.state.round
        if current is not None:
            log.info("%s: %s", current.record.name, end_text(current.reports, ended.silent))

    def _read_news(self) -> None:
        """Read what is new where somebody rang, and elsewhere what may be new."""
        due = self._due(self._clock()) - self._rung
        self._read_rung()
        self._ringing -= self._read(list(due))

    def _read_rung(self) -> None:
        rung, self._rung = self._rung, set()
        self._ringing |= rung
        self._read(list(rung), received=True)

    def _due(self, now_s: float) -> set[str]:
        """Name the nodes whose files are to be read though they did not ring.

        That is often where the run waits for them and their rings do not arrive, and seldom
        elsewhere.
        """
        if abs(now_s - self._swept_s) >= self._sweep_s:
            self._swept_s = now_s
            return set(self.state.nodes)
        mute = self._mute()
        if abs(now_s - self._looked_s) < poll_interval_s(len(mute)):
            return set()
        self._looked_s = now_s
        return set(mute)

    def _read(self, nodes: Sequence[str], *, received: bool = False) -> set[str]:
        """Take in what is new of these nodes, `received` or in their files; return who has news."""
        if not nodes:
            return set()
        readers = [self._readers[node] for node in nodes]
        wrote = set()
        news = journal.read_new_of(self._directory, readers, received=received)
        for node, entries in zip(nodes, news, strict=True):
            if entries:
                wrote.add(node)
            for entry in entries:
                self.state.fold(entry)
        return wrote

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._waiting_since_s = self._clock()
            log.debug("waiting for %s", reason)
        if self._progress is not None:
            waited_s = self._clock() - self._waiting_since_s
            self._progress(f"waiting for {reason}, {waited_s:.0f} s")


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for cyclic garbage so seldom that it costs nothing; never in what there is by then.

    What a master reads and decides it keeps to the end, in millions of objects, none of which is
    part of a cycle. Python looks through all that is new after every 700 of them and through all
    there is now and then: half of the processor time of a check of 16,384 nodes.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)
