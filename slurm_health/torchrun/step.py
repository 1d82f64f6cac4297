# SPDX-License-Identifier: Apache-2.0
"""The processes of one start: each runs the agent of its node, then torchrun; the first one leads.

The first one appends to one file for all, `step.jsonl`: which agents to start, that it is there,
who trains, that workers have ended, and what follows. The others read nothing else: the whole
journal on each node would take bytes by the square of their number. They append to the files of
their nodes, which the first one reads. The records are the journal's own.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from slurm_health.preflight.master.launcher import AgentCommand, ChildLauncher
from slurm_health.preflight.master.master import SILENCE_S, poll_interval_s
from slurm_health.records import records
from slurm_health.records.errors import ChannelError, JournalError
from slurm_health.records.script_records import TrainingPlanned, WorkersEnded, WorkersEnding
from slurm_health.system import journal
from slurm_health.system.signals import signal_behind
from slurm_health.torchrun.channel import CUT_S, NodeZero, OtherNode, Unreachable
from slurm_health.torchrun.place import TaskPlace

STEP = "step"
# How long the first process may take to begin: it may still be loading torch from a cold disk.
BEGIN_S = 180.0
# Of the usual interval between reads: the processes and their agents together then read no more
# often than agents alone do.
READ_SHARE = 2
# The same while the nodes train, which takes days.
_SELDOM, _SELDOM_S = 20, 1.0
# torchrun takes up to 30 s to end workers. Until it is decided what follows, a process shows this
# often that it is there; one that has not for `_QUIET_S` is lost. Only time spent between two reads
# counts: a filesystem that hangs stops all processes, and must not make them look lost.
SIGN_OF_LIFE_S = 2.0
_QUIET_S = 9.0


class Unheard(JournalError):
    """The first process has written nothing, or nothing more."""


class Begun(Exception):
    """The training of this start has begun, as `planned`, and this process comes late."""

    def __init__(self, planned: TrainingPlanned) -> None:
        self.planned = planned
        super().__init__(planned)


class OwnAgent(ChildLauncher):
    """The agent of this node; those of other nodes are children of their processes."""

    def __init__(self, node: str, command: AgentCommand, environ: Mapping[str, str]) -> None:
        super().__init__(command, {node: environ})
        self._node = node

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent if this node is meant, in place of an earlier one."""
        if self._node in nodes:
            self.stop(0.0)
        super().start(launch, nodes)


class Member:
    """One process of a start, in the directory that all of them share, or that is mirrored."""

    def __init__(
        self, place: TaskPlace, directory: Path, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.place, self.directory, self._sleep = place, directory, sleep
        interval_s = poll_interval_s(len(place.nodes))
        self.seldom_s = max(_SELDOM_S, _SELDOM * interval_s)
        self.lost_s = self.seldom_s + _QUIET_S
        self._often_s = READ_SHARE * interval_s


class Leader(Member):
    """The first process. `channel` leads to nodes that share no directory."""

    def __init__(
        self,
        place: TaskPlace,
        everyone: Sequence[str],
        directory: Path,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create the files of all processes, and of `everyone` who may come.

        Raises:
            JournalError: they cannot be written.
        """
        super().__init__(place, directory, sleep)
        others = [node for node in everyone if node != place.node]
        journal.create(directory, [STEP, place.node, *others])
        self.channel: NodeZero | None = None
        self.step = journal.Writer(directory, STEP, time.time)
        self._readers = [journal.Reader(directory, node) for node in others]
        self._reports: dict[str, WorkersEnded] = {}
        self._quiet_s: dict[str, float] = {}
        self._alive_s = -math.inf

    def workers_ended(self) -> bool:
        """Return whether workers of another node have ended."""
        if self.channel is not None:
            self.channel.raise_interrupt()
        for entry in chain.from_iterable(journal.read_new_of(self.directory, self._readers)):
            if isinstance(entry.record, WorkersEnded | WorkersEnding):
                self._quiet_s.pop(entry.record.node, None)
            if isinstance(entry.record, WorkersEnded):
                self._reports[entry.record.node] = entry.record
        return any(report.exit_code for report in self._reports.values())

    def follow_up(
        self,
        own: WorkersEnded,
        nodes: Sequence[str],
        decide: Callable[[list[WorkersEnded], int], TrainingPlanned],
    ) -> TrainingPlanned:
        """Have the workers of all `nodes` end, decide what follows by their reports, publish it.

        Raises:
            JournalError: the journal cannot be used.
        """
        self.step.append(msgspec.structs.replace(own, output=""))
        self._reports.setdefault(own.node, own)  # they are in the order of their ends
        while True:
            self.workers_ended()
            joined = self.channel.connected if self.channel is not None else ()
            missing = {*nodes, *joined} - self._reports.keys()
            if all(self._quiet_s.get(node, 0.0) > self.lost_s for node in missing):
                break
            self.show_life()
            self._sleep(self._often_s)
            self._quiet_s |= {
                node: self._quiet_s.get(node, 0.0) + self._often_s for node in missing
            }
        planned = decide(list(self._reports.values()), len(missing))
        self.step.append(planned)
        return planned

    def show_life(self) -> None:
        """Write that this process goes on, unless it has just done so."""
        if time.monotonic() - self._alive_s >= SIGN_OF_LIFE_S:
            self._alive_s = time.monotonic()
            self.step.append(records.MasterWaits(reason=""))

    def finish(self) -> None:
        """Write that the training is over."""
        with contextlib.suppress(JournalError):
            self.step.append(TrainingPlanned(plan="stop"))

    def stop(self, err: BaseException) -> None:
        """Write that the run is over, for this reason."""
        why = signal_behind(err) if isinstance(err, KeyboardInterrupt | SystemExit) else str(err)
        with contextlib.suppress(JournalError):
            self.step.append(records.MasterStopped(reason=why))


class StepAgents(OwnAgent):
    """The first process's launcher: the others read in the step's file when to start their agents.

    Args:
        leader: the first process.
        command: of the agent here.
        environ: its environment.
    """

    def __init__(self, leader: Leader, command: AgentCommand, environ: Mapping[str, str]) -> None:
        super().__init__(leader.place.node, command, environ)
        self._leader = leader
        self._launches: dict[str, int] = {}

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start the agent here, and have the others started."""
        self._leader.step.append(records.AgentsLaunched(launch=launch, nodes=list(nodes)))
        self._launches |= dict.fromkeys(nodes, launch)
        super().start(launch, nodes)

    def poll(self) -> list[records.AgentsLost]:
        """Return the end of the agent here, and nodes that the channel does not reach."""
        lost = super().poll()
        channel = self._leader.channel
        if channel is not None:
            channel.raise_interrupt()
        for node, peer in channel.peers.items() if channel is not None else ():
            if peer.link is not None or node not in self._launches:
                continue
            if not peer.token:
                reason = "it has not connected to node0"
            elif peer.end is not None:
                reason = f"its process was ended by {peer.end.why}"
            elif time.monotonic() - peer.lost_s > CUT_S:
                reason = f"its connection broke off and did not come back within {CUT_S:g} s"
            else:
                continue
            # The node may be well: this is no evidence against it.
            cause = records.LossCause.NO_JOURNAL
            launch = self._launches.pop(node)
            lost.append(records.AgentsLost(launch=launch, nodes=[node], reason=reason, cause=cause))
        return lost


class Follower(Member):
    """Any other process. `channel` leads to the first one if they share no directory."""

    def __init__(
        self,
        place: TaskPlace,
        directory: Path,
        channel: OtherNode | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Create the files.

        The file exists before any process looks for it: no client of a network filesystem then
        remembers that it did not.

        Raises:
            JournalError: they cannot be written.
        """
        super().__init__(place, directory, sleep)
        journal.create(directory, [STEP, place.node])
        self.channel = channel
        self._reader = journal.Reader(directory, STEP)
        self._read: list[records.Record] = []

    def _news(self) -> list[records.Record]:
        """Return what the first process has written meanwhile.

        Raises:
            JournalError: the journal cannot be used.
            ChannelError: the first process was ended.
            UsageError: it does not want this node any more.
        """
        if self.channel is not None:
            self.channel.raise_failure()
        news = [entry.record for entry in self._reader.read_new() if entry.record is not None]
        self._read += news
        for record in news:
            if isinstance(record, records.MasterStopped):
                ended = f"the run was ended: it was ended by {record.reason}"
                raise ChannelError(self.place.nodes[0], ended)
        return news

    def check(self, agent: OwnAgent) -> TrainingPlanned:
        """Take part in the check that the first process runs; return what follows.

        Raises:
            Begun: the training has begun already.
            JournalError: the journal cannot be used, or the first process writes nothing any more.
            ChannelError, UsageError: as the channel, or the first process was ended.
        """
        quiet_s = 0.0
        while True:
            first, news = not self._read, self._news()
            if (planned := self._planned(after_check=True)) is not None:
                if first and self.place.meeting is not None:
                    raise Begun(planned)
                agent.stop()
                return planned
            quiet_s = 0.0 if news else quiet_s
            if quiet_s > (limit_s := SILENCE_S if self._read else BEGIN_S):
                raise Unheard(
                    self._reader.path,
                    f"{self.place.nodes[0]}, which runs the check, has written nothing for"
                    f" {limit_s:.0f} s; is this a directory on a filesystem that all nodes share?"
                    " (--journal DIR, SLURM_HEALTH_JOURNAL)",
                )
            for record in news:
                if isinstance(record, records.AgentsLaunched):
                    agent.start(record.launch, record.nodes)
            for lost in agent.poll():
                # The agent is gone, so its file still has one writer.
                ended = records.AgentEnded(
                    node=self.place.node, launch=lost.launch, reason=lost.reason
                )
                self._append(ended)
            self._sleep(self._often_s)
            quiet_s += self._often_s

    def _planned(self, *, after_check: bool) -> TrainingPlanned | None:
        planned = [record for record in self._read if isinstance(record, TrainingPlanned)]
        return next((one for one in planned if (one.plan == "start") == after_check), None)

    def workers_ended(self) -> bool:
        """Return whether workers of another node have ended."""
        if self.channel is not None:
            self.channel.lasts = True
        return any(isinstance(record, WorkersEnded) for record in self._news())

    def show_life(self) -> None:
        """Write that this process goes on."""
        self._append(WorkersEnding(node=self.place.node))

    def finish(self) -> None:
        """Write that the training is over."""
        with contextlib.suppress(JournalError):
            self._append(WorkersEnded(node=self.place.node, exit_code=0))

    def _append(self, record: records.Record) -> None:
        journal.Writer(self.directory, self.place.node, time.time).append(record)

    def follow_up(self, own: WorkersEnded) -> TrainingPlanned | None:
        """Report the end of the workers here; return what follows, None if the first one is lost.

        Raises:
            JournalError, ChannelError, UsageError: as `check`.
        """
        if self.channel is not None:
            self.channel.lasts = False
        self._append(own)
        quiet_s, lost_s = 0.0, self.lost_s
        while quiet_s <= lost_s:
            try:
                quiet_s = 0.0 if self._news() else quiet_s
            except Unreachable:
                return None
            if (planned := self._planned(after_check=False)) is not None:
                return planned
            if any(isinstance(record, WorkersEnded) for record in self._read):
                lost_s = SILENCE_S  # it looks for the cause
            self._sleep(self._often_s)
            quiet_s += self._often_s
        return None
