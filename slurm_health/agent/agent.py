# SPDX-License-Identifier: Apache-2.0
"""One per node: keeps the node's workers, runs the rounds the master writes, records what happened.

The agent reads `master.jsonl` and writes `<node>.jsonl`; there is no other channel. It loads no
torch: that lives in the workers, which it kills and replaces when they hang or die.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slurm_health import journal
from slurm_health.agent import node_facts
from slurm_health.agent.gpu_monitor import BurnWatch
from slurm_health.agent.worker_process import Worker, Workers
from slurm_health.core.record_codec import Entry
from slurm_health.core.records import (
    AgentEnded,
    AgentsLaunched,
    AgentStarted,
    DevicesUnopened,
    DevicesWatched,
    GroupAborted,
    NodeReported,
    Record,
    Rendezvous,
    RoundStarted,
    RunFinished,
    RunStarted,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
    WorkersStarting,
)
from slurm_health.core.session.node_round import Ending, NodeRound, part_of, process_groups
from slurm_health.core.verdict import Outcome

# How long a client of a network filesystem may take to show the master's file.
JOURNAL_VISIBLE_S = 15.0
# From an abort to the kill of a worker that is stuck inside a collective.
ABORT_GRACE_S = 0.3
STARTS_PER_LAUNCH = 2  # a worker that ends before it is ready gets one more try
# Eight GPUs whose driver keeps no state between processes are opened within this.
OPEN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the master tells an agent on its command line.

    `gpus` is how many the job has on this node, as Slurm told the master; 0 where it did not.
    """

    node: str
    directory: Path
    run_id: str
    launch: int
    python: str
    poll_s: float
    silence_s: float
    cpu_workers: int = 1
    gpus: int = 0


class JournalNotVisible(Exception):
    """This node does not see the master's journal."""


class Agent:
    """The agent of one node; `run` serves until the master is done."""

    def __init__(
        self,
        settings: AgentSettings,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._monotonic = monotonic
        self._master = journal.Reader(settings.directory, journal.MASTER)
        self._writer = journal.Writer(settings.directory, settings.node, clock)
        self._starts = 0
        self._device_failures = 0
        self._loaded_s: float | None = None
        self._round: NodeRound | None = None
        self._end: str | None = None
        self._watch: BurnWatch | None = None
        self._hostname = socket.gethostname()
        self._address = node_facts.own_address(environ, self._hostname)
        self._workers = Workers(
            python=settings.python,
            on_cpus=settings.cpu_workers,
            gpus=settings.gpus,
            address=self._address,
            environ=environ,
            monotonic=monotonic,
        )

    def run(self) -> None:
        """Serve rounds until the verdict, or until the master has been silent for too long.

        Raises:
            JournalNotVisible: this node does not see the master's journal.
            JournalError: the journal cannot be read or written.
        """
        backlog = self._wait_for_journal()
        settings = self._settings
        heard_s = looked_s = self._monotonic()
        self._writer.append(
            AgentStarted(
                node=settings.node,
                launch=settings.launch,
                hostname=self._hostname,
                address=self._address,
                leaf=node_facts.leaf_switch(self._environ),
            )
        )
        self._start_workers()
        try:
            self._heed(backlog)
            while self._end is None:
                self._wait()
                news = self._master.read_new()
                looked_before_s, looked_s = looked_s, self._monotonic()
                # What held us up, as a filesystem that hung, may have held up the master as well.
                if news or looked_s - looked_before_s > settings.silence_s / 2:
                    heard_s = looked_s
                if looked_s - heard_s > settings.silence_s:
                    self._end = f"the master has said nothing for {settings.silence_s:.0f} s"
                self._heed(news)
                self._check_workers()
                self._start_due_workers()
                self._say_unopened()
                if self._watch is not None:
                    self._watch.read()
        finally:
            held = self._workers.end()
            if self._watch is not None:
                self._watch.end()
        reason = "; ".join(each for each in (self._end, held) if each)
        self._writer.append(AgentEnded(node=settings.node, launch=settings.launch, reason=reason))

    # --- the master's words ----------------------------------------------------------------------

    def _wait_for_journal(self) -> list[Entry]:
        """Return the first entries of the master's file, which must be those of this run."""
        give_up = self._monotonic() + JOURNAL_VISIBLE_S
        entries: list[Entry] = []
        while self._monotonic() < give_up:
            entries += self._master.read_new()
            if any(_starts_run(entry, self._settings.run_id) for entry in entries):
                return entries
            time.sleep(self._settings.poll_s)
        raise JournalNotVisible(str(self._master.path))

    def _heed(self, entries: list[Entry]) -> None:
        for entry in entries:
            match entry.record:
                case RoundStarted() as record:
                    self._begin_round(record)
                case GroupAborted() as record:
                    self._abort(record)
                case VerdictReached() | RunFinished():
                    self._end = "the run is over"
                case AgentsLaunched(launch=launch, nodes=nodes):
                    if launch > self._settings.launch and self._settings.node in nodes:
                        self._end = "another agent took over"
                case _:
                    pass

    def _begin_round(self, record: RoundStarted) -> None:
        if self._round is not None and self._watch is not None:  # void: a new master begins anew
            self._writer.append(*self._watched(self._round.record.round))
        self._round = None
        part = part_of(record, self._settings.node)
        ready = self._workers.ready
        if part is None or not ready or not part[1].port:
            return  # the master knows: it did not count on this node
        group, far = part
        self._round = NodeRound(
            record=record,
            node=self._settings.node,
            group=group,
            workers=len(ready),
            started_s=self._monotonic(),
        )
        if "burn_s" in record.options and ready[0]["backend"] != "gloo":
            self._watch = BurnWatch(self._environ)
        near = Rendezvous(address="127.0.0.1", port=ready[0]["store_port"])
        self._send_round(self._round, far=far, near=near)

    def _send_round(self, current: NodeRound, *, far: Rendezvous, near: Rendezvous) -> None:
        record = current.record
        for worker in self._workers:
            worker.send(
                {
                    "op": "round",
                    "round": record.round,
                    "timeout_s": record.deadline_s + 10.0,
                    "local_size": current.workers,
                    "probes": msgspec.to_builtins(record.probes),
                    "options": record.options,
                    "groups": process_groups(
                        self._settings.run_id, current, worker.local_rank, far=far, near=near
                    ),
                }
            )

    def _abort(self, record: GroupAborted) -> None:
        current = self._round
        if current is None or not current.is_aborted_by(record):
            return
        current.aborted = record
        current.kill_at_s = self._monotonic() + ABORT_GRACE_S
        for worker in self._workers:
            worker.send({"op": "abort", "round": record.round})

    # --- the workers' words ----------------------------------------------------------------------

    def _wait(self) -> None:
        timeout = self._settings.poll_s
        if self._round and self._round.kill_at_s is not None:
            timeout = min(timeout, max(0.0, self._round.kill_at_s - self._monotonic()))
        self._workers.wait(timeout)

    def _check_workers(self) -> None:
        for worker in self._workers:
            if worker not in self._workers:
                return  # all were replaced because of what another one said
            # In this order: what a worker said before it ended is read before its end is noted.
            ended = worker.ended()
            for event in worker.read_events():
                self._hear(worker, event)
            if ended is not None:
                self._worker_ended(worker, ended)
                return
        current = self._round
        if current and current.kill_at_s is not None and self._monotonic() >= current.kill_at_s:
            self._report(current.stuck())

    def _hear(self, worker: Worker, event: dict[str, Any]) -> None:
        if worker.hears_start(event):
            if event["event"] == "ready" and self._workers.ready:
                self._say_ready(self._workers.ready)
            elif event["event"] == "loaded" and all(each.torch for each in self._workers):
                self._loaded_s = self._monotonic()
            return
        current = self._round
        if current is None or event["round"] != current.record.round:
            return
        if event["event"] == "scope":
            current.entered(worker.local_rank, event)
        elif event["event"] == "sample":
            sampled = current.sample(worker.local_rank, event)
            if sampled is not None:
                self._writer.append(sampled)
        elif event["event"] == "done":
            ending = current.done(worker.local_rank, event)
            if ending is not None:
                self._report(ending)

    def _say_ready(self, ready: Sequence[Mapping[str, Any]]) -> None:
        first = ready[0]
        self._writer.append(
            WorkersReady(
                node=self._settings.node,
                launch=self._settings.launch,
                store_port=first["store_port"],
                torch=first["torch"],
                backend=first["backend"],
                devices=[event["device"] for event in ready],
                collective_library=first["collective_library"],
                start_ms=max(event["start_ms"] for event in ready),
                model=" and ".join(dict.fromkeys(event["model"] for event in ready)),
                free_bytes=min(event["free_bytes"] for event in ready),
                interface=node_facts.chosen_interface(
                    self._environ, self._address, first["backend"]
                ),
            )
        )

    def _report(self, ending: Ending) -> None:
        """Say the last word on the current round; replace the workers after it if need be."""
        current = self._round
        assert current is not None
        self._round = None
        last: list[Record] = []
        if ending.outcome is Outcome.MEASURED:
            last += current.partial_samples()
        last += self._watched(current.record.round)
        reported = NodeReported(
            node=self._settings.node,
            round=current.record.round,
            outcome=ending.outcome,
            elapsed_ms=round((self._monotonic() - current.started_s) * 1e3, 1),
            detail=ending.detail,
            crashed=ending.crashed,
            wrong_results=ending.wrong_results,
            unmeasured=ending.unmeasured,
        )
        # In one write: whoever sees the report also sees that this node is not ready.
        if ending.replace:
            last.append(self._starting())
        self._writer.append(*last, reported)
        if ending.replace:
            self._start_workers()

    def _watched(self, round_index: int) -> list[DevicesWatched]:
        """End the watch over the devices, if there is one; return what it saw."""
        if self._watch is None:
            return []
        devices, not_watched = self._watch.end()
        self._watch = None
        seen = DevicesWatched(
            node=self._settings.node, round=round_index, devices=devices, not_watched=not_watched
        )
        return [seen]

    def _starting(self) -> WorkersStarting:
        return WorkersStarting(node=self._settings.node, launch=self._settings.launch)

    # --- the workers' lives ---------------------------------------------------------------

    def _say_unopened(self) -> None:
        """Say once which devices do not open, when they should have."""
        unopened = [worker for worker in self._workers if not worker.opened]
        if self._loaded_s is None or not unopened:
            return
        waited_s = self._monotonic() - self._loaded_s
        if waited_s < OPEN_S:
            return
        self._loaded_s = None
        self._writer.append(
            DevicesUnopened(
                node=self._settings.node,
                launch=self._settings.launch,
                devices=[worker.local_rank for worker in unopened],
                waited_s=round(waited_s, 1),
                torch=unopened[0].torch,
            )
        )

    def _start_workers(self) -> None:
        self._loaded_s = None
        self._workers.replace()
        self._start_due_workers()

    def _start_due_workers(self) -> None:
        obstacle = self._workers.start_due()
        if obstacle:
            self._fail(obstacle)

    def _worker_ended(self, worker: Worker, how: str) -> None:
        if worker.ready:
            self._starts = self._device_failures = 0
            if self._round is not None:
                self._report(self._round.died(worker.local_rank, how))
                return
        self._starts += 1
        self._device_failures += bool(worker.unusable)
        if self._starts < STARTS_PER_LAUNCH:
            self._writer.append(self._starting())
            self._start_workers()
            return
        self._workers.kill()
        self._fail(
            worker.unusable or how,
            device_failed=self._device_failures == self._starts,
            torch=worker.torch,
        )

    def _fail(self, reason: str, *, device_failed: bool = False, torch: str = "") -> None:
        """Say that this node can take part in no round."""
        self._writer.append(
            WorkersFailed(
                node=self._settings.node,
                launch=self._settings.launch,
                reason=reason,
                device_failed=device_failed,
                torch=torch,
            )
        )


def _starts_run(entry: Entry, run_id: str) -> bool:
    return isinstance(entry.record, RunStarted) and entry.record.run_id == run_id
