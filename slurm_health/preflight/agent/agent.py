# SPDX-License-Identifier: Apache-2.0
"""One per node: keeps the node's workers, runs the rounds the master writes, records what happened.

The agent reads the master's orders and writes `<node>.jsonl`; there is no other channel. It loads
no torch and no numpy: workers do, which it kills and replaces when they hang or die.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.node_round import NodeRound, RoundEnding, round_command
from slurm_health.preflight.agent.order_poller import OrderPoller, at_random
from slurm_health.preflight.agent.worker_process import Done, Gone, InRound, Worker
from slurm_health.preflight.agent.workers import AgentSettings, Workers
from slurm_health.preflight.orders import Bell
from slurm_health.records import records
from slurm_health.records.nodeset import expand
from slurm_health.records.probe_catalog import STORAGE_NODES
from slurm_health.records.verdict import Outcome
from slurm_health.system import journal

if TYPE_CHECKING:
    from slurm_health.preflight.agent.gpu_monitor import BurnWatch
    from slurm_health.preflight.agent.storage import StorageTest

# From an abort to the kill of a stuck worker. Over NCCL it first shows that its device computes.
ABORT_GRACE_S, ABORT_GRACE_CPUS_S = 3.0, 0.3
# A sample waits so long for the rest of its round, to be written with it.
TOGETHER_S = 1.0


class Agent:
    """The agent of one node; `run` serves until the master is done."""

    def __init__(
        self,
        settings: AgentSettings,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        make_worker: Callable[..., Worker] = Worker,
        bell: Bell | None = None,
        random: Callable[[], float] = at_random,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._monotonic = monotonic
        self._writer = journal.Writer(settings.directory, settings.node, clock)
        self._bell = Bell(settings.node) if bell is None else bell
        self._poller = OrderPoller(
            settings.directory,
            self._bell,
            node=settings.node,
            poll_s=settings.poll_s,
            monotonic=monotonic,
            random=random,
        )
        self._round: NodeRound | None = None
        self._unsettled: NodeRound | None = None  # reported, but some workers are not done
        self._end: str | None = None
        self._unsaid: list[records.Record] = []
        self._unsaid_since_s = 0.0
        self._watch: BurnWatch | None = None
        self._storage: StorageTest | None = None
        self._hostname = socket.gethostname()
        self._address = node_facts.own_address(environ, self._hostname)
        self._workers = Workers(
            settings,
            address=self._address,
            environ=environ,
            say=self._say,
            monotonic=monotonic,
            make=make_worker,
        )

    def run(self) -> None:
        """Serve rounds until the verdict, or until the master has been silent for too long.

        Raises:
            JournalNotVisible: this node does not see the master's journal.
            JournalError: the journal cannot be read or written.
        """
        try:
            self.begin()
            while self.serves:
                storage = self._storage.descriptor if self._storage is not None else None
                self._workers.wait(self.wait_s(), self._bell.descriptor, storage)
                self.step()
        finally:
            held = self._workers.end()
            if self._storage is not None:
                self._storage.end()
            if self._watch is not None:
                self._watch.end()
        self.sign_off(held)

    def begin(self) -> None:
        """Find the run in the journal, say that this agent is there, and start its workers.

        Raises:
            JournalNotVisible: this node does not see the master's journal.
            JournalError: the journal cannot be read or written.
        """
        backlog = self._poller.first_orders(self._settings.run_id)
        self._say(
            records.AgentStarted(
                node=self._settings.node,
                launch=self._settings.launch,
                hostname=self._hostname,
                address=self._address,
                leaf=node_facts.leaf_switch(self._environ),
                driver_keeps_state=node_facts.driver_keeps_state(),
            )
        )
        self._obey(backlog)  # first: it says which probes to start
        self._replace_workers()

    @property
    def serves(self) -> bool:
        """Whether there may be more to do."""
        return self._end is None

    def wait_s(self) -> float:
        """Return how long there is nothing to do unless a worker says something."""
        due_s = self._poller.next_s
        for current in (self._round, self._unsettled):
            if current is not None and current.kill_at_s is not None:
                due_s = min(due_s, current.kill_at_s)
        return max(0.0, due_s - self._monotonic())

    def step(self) -> None:
        """Do what has become due; never wait.

        Raises:
            JournalError: the journal cannot be read or written.
        """
        self._poller.listen()
        if self._monotonic() >= self._poller.next_s:
            news = self._poller.look(self._settings.silence_s)
            if news is None:
                self._end = f"the master has been silent for {self._settings.silence_s:.0f} s"
            else:
                self._obey(news)
        for worker, line in self._workers.lines():
            if isinstance(line, Gone):
                self._worker_gone(worker, line)
            else:
                self._take(worker, line)
        current, late, now_s = self._round, self._unsettled, self._monotonic()
        if current and current.kill_at_s is not None and now_s >= current.kill_at_s:
            self._report(current.stuck())
        if late and late.kill_at_s is not None and now_s >= late.kill_at_s:
            self._replace_workers()
        self._workers.tick()
        if self._watch is not None:
            self._watch.read()
        if self._storage is not None and (tests := self._storage.poll()):
            self._say(*tests)
        if self._unsaid and self._monotonic() - self._unsaid_since_s >= TOGETHER_S:
            self._say()

    def _say(self, *new: records.Record) -> None:
        """Write records, after those that waited for others to be written with."""
        unsaid, self._unsaid = self._unsaid, []
        self._bell.ring(*self._writer.append(*unsaid, *new))

    def sign_off(self, held: str = "") -> None:
        """Write the last word, with what cannot be ended here.

        Raises:
            JournalError: the journal cannot be written.
        """
        reason = "; ".join(one for one in (self._end, held) if one)
        last = records.AgentEnded(
            node=self._settings.node, launch=self._settings.launch, reason=reason
        )
        self._writer.append(*self._unsaid, last)  # the master may not be listening any more

    # --- the master's orders ----------------------------------------------------------------------

    def _obey(self, news: Sequence[records.Record]) -> None:
        for record in news:
            match record:
                case records.RoundStarted():
                    self._begin_round(record)
                    self._begin_storage(record)  # workers measure while it loads and forks
                case records.GroupAborted():
                    self._abort(record)
                case records.VerdictReached():
                    self._end = "the run is over"
                case records.AgentsLaunched(launch=launch, nodes=nodes, light=light):
                    if launch == self._settings.launch:
                        self._workers.light = bool(light)
                    elif launch > self._settings.launch and self._settings.node in nodes:
                        self._end = "another agent took over"
                case _:
                    pass

    def _begin_round(self, record: records.RoundStarted) -> None:
        if self._round is not None and self._watch is not None:  # it ended without this node
            self._say(*self._watched(self._round.record.round))
        self._round = None
        ready = self._workers.ready
        if not (ready or self._workers.ended):
            return  # the master knows: it did not count on this node
        (group,), (far,) = record.groups, record.rendezvous
        self._round = NodeRound(
            record=record,
            node=self._settings.node,
            group=group,
            workers=len(ready),
            started_s=self._monotonic(),
            on_cpus=all(line.on_cpus for line in ready),
        )
        if not ready:  # it did: one ended before this was read, and others are being started
            self._report(self._round.not_begun(self._workers.ended))
            return
        allowed = self._settings.programs
        asked = [probe.path for probe in record.probes if probe.path]
        if foreign := [path for path in asked if allowed is not None and path not in allowed]:
            self._report(self._round.refused(foreign[0]))
            return
        if "burn_s" in record.options and not ready[0].on_cpus:
            # Not before the workers are started: until they are, every node waits.
            from slurm_health.preflight.agent.gpu_monitor import BurnWatch

            self._watch = BurnWatch(self._environ, [line.device for line in ready])
        near = records.Rendezvous(address="127.0.0.1", port=ready[0].store_port)
        secret, current = self._poller.secret, self._round
        for worker in self._workers:
            worker.send(round_command(secret, current, worker.local_rank, far=far, near=near))

    def _begin_storage(self, record: records.RoundStarted) -> None:
        tested = record.options.get(STORAGE_NODES)
        if tested and self._storage is None and self._settings.node in expand(str(tested)):
            from slurm_health.preflight.agent.storage import StorageTest

            self._storage = StorageTest(self._settings.node, record.options, self._poller.secret)

    def _abort(self, record: records.GroupAborted) -> None:
        current = self._round
        if current is not None and current.is_aborted_by(record):
            current.aborted = record
            self._stop(current)

    def _stop(self, current: NodeRound) -> None:
        """Tell the workers to stop; who is not done by `kill_at_s` is killed."""
        on_cpus = all(w.ready is None or w.ready.on_cpus for w in self._workers)
        current.kill_at_s = self._monotonic() + (ABORT_GRACE_CPUS_S if on_cpus else ABORT_GRACE_S)
        for worker in self._workers:
            worker.send({"op": "abort", "round": current.record.round})

    # --- the workers' lines ----------------------------------------------------------------------

    def _take(self, worker: Worker, line: InRound) -> None:
        late, current = self._unsettled, self._round
        if late is not None and line.round == late.record.round:
            if isinstance(line, Done):
                ending = late.done(worker.local_rank, line)
                assert ending is not None  # a worker has failed
                if ending.replace:
                    self._replace_workers()
                elif not ending.unsettled:
                    self._unsettled = None
                    self._workers.say_ready()
        elif current is not None and line.round == current.record.round:
            result = current.take(worker.local_rank, line)
            if isinstance(result, RoundEnding):
                self._report(result)
            elif result is not None:
                if not self._unsaid:
                    self._unsaid_since_s = self._monotonic()
                self._unsaid.append(result)

    def _worker_gone(self, worker: Worker, gone: Gone) -> None:
        """Report it, where a round is in progress, and replace it: it will answer nobody."""
        if worker.ready:
            self._workers.succeeded()
            if self._round is not None:
                self._report(self._round.gone(worker.local_rank, gone))
                return
        self._unsettled = None
        self._workers.again(worker, gone)

    def _replace_workers(self) -> None:
        self._unsettled = None
        self._workers.replace()

    def _report(self, ending: RoundEnding) -> None:
        """Say the last word on the current round; replace the workers after it if need be."""
        current = self._round
        assert current is not None
        self._round = None
        measured = ending.outcome is Outcome.MEASURED
        last: list[records.Record] = [*(current.partial_samples() if measured else ())]
        last += self._watched(current.record.round)
        reported = records.NodeReported(
            node=self._settings.node,
            round=current.record.round,
            outcome=ending.outcome,
            elapsed_ms=round((self._monotonic() - current.started_s) * 1e3, 1),
            detail=ending.detail,
            crashed=ending.crashed,
            wrong_results=ending.wrong_results,
            unmeasured=ending.unmeasured,
            connecting=ending.connecting,
        )
        # In one write: who sees the report sees that this node is not ready.
        if ending.replace or ending.unsettled:
            last.append(self._workers.starting())
        self._say(*last, reported)
        if ending.replace:
            self._replace_workers()
        elif ending.unsettled:
            self._unsettled = current
            self._stop(current)

    def _watched(self, round_index: int) -> list[records.DevicesWatched]:
        """End the watch over the devices, if there is one; return what it saw."""
        if self._watch is None:
            return []
        devices, not_watched = self._watch.end()
        self._watch = None
        seen = records.DevicesWatched(
            node=self._settings.node, round=round_index, devices=devices, not_watched=not_watched
        )
        return [seen]
