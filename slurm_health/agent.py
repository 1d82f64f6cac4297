# SPDX-License-Identifier: Apache-2.0
"""One per node: keeps the node's workers, runs the rounds the master writes, records what happened.

The agent reads `master.jsonl` and writes `<node>.jsonl`; there is no other channel. It loads no
torch: that lives in the workers, which it kills and replaces when they hang or die.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slurm_health import journal, node_facts
from slurm_health.burn_watch import BurnWatch
from slurm_health.core.records import (
    AgentEnded,
    AgentsLaunched,
    AgentStarted,
    DevicesWatched,
    Entry,
    GroupAborted,
    NodeReported,
    Rendezvous,
    RoundStarted,
    RunFinished,
    RunStarted,
    Sampled,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
    WorkersStarting,
)
from slurm_health.core.verdict import Outcome
from slurm_health.workers import Worker

# How long a client of a network filesystem may take to show the master's file.
JOURNAL_VISIBLE_S = 15.0
# From an abort to the kill of a worker that is stuck inside a collective.
ABORT_GRACE_S = 0.3
STARTS_PER_LAUNCH = 2  # a worker that ends before it is ready gets one more try

_Quantity = tuple[str, str]  # a probe and its quantity


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What the master tells an agent on its command line."""

    node: str
    directory: Path
    run_id: str
    launch: int
    python: str
    poll_s: float
    lifetime_s: float
    cpu_workers: int = 1


class JournalNotVisible(Exception):
    """This node does not see the master's journal."""


@dataclass
class _CurrentRound:
    """The round this node is in."""

    record: RoundStarted
    group: list[str]
    started: float
    samples: dict[tuple[_Quantity, int], dict[str, Any]] = field(default_factory=dict)
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    aborted: GroupAborted | None = None
    kill_at: float | None = None


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
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._ready: dict[int, dict[str, Any]] = {}
        self._starts = 0
        self._round: _CurrentRound | None = None
        self._end: str | None = None
        self._hanging = ""
        self._watch: BurnWatch | None = None
        hostname = socket.gethostname()
        self._address = node_facts.own_address(environ, hostname)
        self._hostname = hostname

    def run(self) -> None:
        """Serve rounds until the verdict, or until the agent's lifetime has passed.

        Raises:
            JournalNotVisible: this node does not see the master's journal.
            JournalError: the journal cannot be read or written.
        """
        backlog = self._wait_for_journal()
        leave_at = self._monotonic() + self._settings.lifetime_s
        settings = self._settings
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
                self._heed(self._master.read_new())
                self._check_workers()
                if self._watch is not None:
                    self._watch.read()
                if self._monotonic() > leave_at:
                    self._end = f"the master has said nothing for {settings.lifetime_s:.0f} s"
        finally:
            self._stop_workers()
            if self._watch is not None:
                self._watch.end()
        self._writer.append(
            AgentEnded(node=settings.node, launch=settings.launch, reason=self._end or "")
        )

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
        if self._round is not None:  # void: a new master begins anew
            self._end_watch(self._round.record.round)
        self._round = None
        for group, rendezvous in zip(record.groups, record.rendezvous, strict=True):
            if self._settings.node not in group:
                continue
            if not self._ready or not rendezvous.port:
                return  # the master knows: it did not count on this group
            self._round = _CurrentRound(record=record, group=group, started=self._monotonic())
            if "burn_s" in record.options and self._ready[0]["backend"] != "gloo":
                self._watch = BurnWatch(self._environ)
            for worker in self._workers:
                worker.send(
                    {
                        "op": "round",
                        "round": record.round,
                        "timeout_s": record.deadline_s + 10.0,
                        "local_size": len(self._workers),
                        "probes": msgspec.to_builtins(record.probes),
                        "options": record.options,
                        "groups": self._groups_of(worker, record, group, rendezvous),
                    }
                )

    def _groups_of(
        self, worker: Worker, record: RoundStarted, group: list[str], rendezvous: Rendezvous
    ) -> dict[str, dict[str, object]]:
        """Return the process group of each scope in which this worker has somebody beside it."""
        local, size = worker.local_rank, len(self._workers)
        place = group.index(self._settings.node)
        meeting = f"{self._settings.run_id}/{record.round}/{group[0]}"
        far = {"address": rendezvous.address, "port": rendezvous.port}
        near = {"address": "127.0.0.1", "port": self._ready[0]["store_port"]}
        groups: dict[str, dict[str, object]] = {}
        if size > 1:
            prefix = f"{self._settings.run_id}/{record.round}/node"
            groups["node"] = {"rank": local, "world_size": size, "prefix": prefix, **near}
        if size > 1 and len(group) > 1:
            prefix = f"{meeting}/rail{local}"
            groups["rail"] = {"rank": place, "world_size": len(group), "prefix": prefix, **far}
        if len(group) > 1:
            rank, world_size = place * size + local, len(group) * size
            groups["pair"] = {"rank": rank, "world_size": world_size, "prefix": meeting, **far}
        return groups

    def _abort(self, record: GroupAborted) -> None:
        current = self._round
        if current is None or record.round != current.record.round or record.group != current.group:
            return
        current.aborted = record
        current.kill_at = self._monotonic() + ABORT_GRACE_S
        for worker in self._workers:
            worker.send({"op": "abort", "round": record.round})

    # --- the workers' words ----------------------------------------------------------------------

    def _wait(self) -> None:
        timeout = self._settings.poll_s
        if self._round and self._round.kill_at is not None:
            timeout = min(timeout, max(0.0, self._round.kill_at - self._monotonic()))
        self._selector.select(timeout)

    def _check_workers(self) -> None:
        for worker in self._workers:
            # In this order: what a worker said before it ended is read before its end is noted.
            ended = worker.ended()
            for event in worker.read_events():
                self._hear(worker, event)
            if ended is not None:
                self._worker_ended(worker, ended)
                return
        current = self._round
        if current and current.kill_at is not None and self._monotonic() >= current.kill_at:
            assert current.aborted is not None
            self._report(
                Outcome.TIMED_OUT if current.aborted.timed_out else Outcome.NOT_RUN,
                f"stopped while stuck: {current.aborted.reason}",
                replace=True,
            )

    def _hear(self, worker: Worker, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self._ready[worker.local_rank] = event
            if len(self._ready) == len(self._workers):
                self._say_ready()
            return
        current = self._round
        if current is None or event["round"] != current.record.round:
            return
        if event["event"] == "sample":
            quantity = (event["probe"], event["quantity"])
            current.samples[quantity, worker.local_rank] = event
            self._record_samples(current, quantity)
        elif event["event"] == "done":
            current.done[worker.local_rank] = event
            self._consider_report(current)

    def _say_ready(self) -> None:
        ready = [self._ready[rank] for rank in sorted(self._ready)]
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
            )
        )

    def _record_samples(self, current: _CurrentRound, quantity: _Quantity) -> None:
        """Append a quantity's samples once every worker of the node has given its own."""
        ranks = range(len(self._workers))
        if all((quantity, rank) in current.samples for rank in ranks):
            self._writer.append(self._sampled(current, quantity))

    def _record_partial_samples(self, current: _CurrentRound) -> None:
        """Append what only some of the workers measure, now that all have ended their round."""
        complete = len(self._workers)
        given: dict[_Quantity, int] = {}
        for quantity, _ in current.samples:
            given[quantity] = given.get(quantity, 0) + 1
        for quantity, count in given.items():
            if count < complete:
                self._writer.append(self._sampled(current, quantity))

    def _sampled(self, current: _CurrentRound, quantity: _Quantity) -> Sampled:
        events = {rank: event for (of, rank), event in current.samples.items() if of == quantity}
        first = next(iter(events.values()))
        return Sampled(
            node=self._settings.node,
            round=current.record.round,
            group=current.group,
            probe=quantity[0],
            quantity=quantity[1],
            scope=first["scope"],
            iteration_ms=[
                _rounded(events[rank]["iteration_ms"]) if rank in events else []
                for rank in range(max(events) + 1)
            ],
            world_size=first["world_size"],
            total_bytes=first["total_bytes"],
            flop=first["flop"],
            figures=first["figures"],
        )

    def _consider_report(self, current: _CurrentRound) -> None:
        """Report the round once its outcome is known: all are done, or one has failed."""
        failed = [event for event in current.done.values() if event["outcome"] == "failed"]
        unmeasured = [e for e in current.done.values() if e["outcome"] == "unmeasured"]
        # Another worker of this node may wait for the one that gave up. And NCCL, or a device, is
        # in a state nobody vouches for after a failure; gloo is not.
        waiting = len(current.done) < len(self._workers)
        if failed:
            self._report(
                Outcome.FAILED,
                failed[0]["detail"],
                crashed=any(event["own_fault"] for event in failed),
                replace=waiting or self._ready[0]["backend"] != "gloo",
            )
        elif unmeasured:
            self._report(Outcome.NOT_RUN, unmeasured[0]["detail"], unmeasured=True, replace=waiting)
        elif len(current.done) == len(self._workers):
            stopped = [event for event in current.done.values() if event["outcome"] != "measured"]
            if not stopped:
                self._record_partial_samples(current)
                self._report(Outcome.MEASURED, "")
                return
            aborted = current.aborted
            timed_out = aborted is None or aborted.timed_out
            self._report(
                Outcome.TIMED_OUT if timed_out else Outcome.NOT_RUN,
                aborted.reason if aborted else stopped[0]["detail"],
            )

    def _report(
        self,
        outcome: Outcome,
        detail: str,
        *,
        crashed: bool = False,
        unmeasured: bool = False,
        replace: bool = False,
    ) -> None:
        """Say the last word on the current round; `replace` the workers after it."""
        current = self._round
        assert current is not None
        self._round = None
        self._end_watch(current.record.round)
        reported = NodeReported(
            node=self._settings.node,
            round=current.record.round,
            outcome=outcome,
            elapsed_ms=round((self._monotonic() - current.started) * 1e3, 1),
            detail=detail,
            crashed=crashed,
            unmeasured=unmeasured,
        )
        if not replace:
            self._writer.append(reported)
            return
        # In one write: whoever sees the report also sees that this node is not ready.
        self._writer.append(self._starting(), reported)
        self._start_workers()

    def _end_watch(self, round_index: int) -> None:
        if self._watch is None:
            return
        devices, not_watched = self._watch.end()
        self._watch = None
        self._writer.append(
            DevicesWatched(
                node=self._settings.node,
                round=round_index,
                devices=devices,
                not_watched=not_watched,
            )
        )

    def _starting(self) -> WorkersStarting:
        return WorkersStarting(node=self._settings.node, launch=self._settings.launch)

    # --- the workers' lives ---------------------------------------------------------------

    def _start_workers(self) -> None:
        """(Re)place all workers of this node."""
        self._stop_workers()
        environ = self._worker_environ()
        devices = node_facts.device_count(environ)
        obstacle = self._hanging or node_facts.missing_devices(environ, devices)
        if obstacle:
            self._fail(obstacle)
            return
        workers = devices or self._settings.cpu_workers
        threads = max(1, node_facts.usable_cpus(self._environ) // workers)
        for local_rank in range(workers):
            worker = Worker(
                python=self._settings.python,
                local_rank=local_rank,
                threads=threads,
                devices=devices,
                environ=environ,
            )
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ)
            self._workers.append(worker)

    def _worker_environ(self) -> dict[str, str]:
        environ = dict(self._environ)
        interface = node_facts.interface_of(self._address)
        if interface:
            # Otherwise gloo resolves the host name, which may be a loopback address.
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # What a worker says last explains its end; torch warns of names it cannot look up.
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return environ

    def _worker_ended(self, worker: Worker, how: str) -> None:
        was_ready = worker.local_rank in self._ready
        current = self._round
        if was_ready:
            self._starts = 0
            if current is not None:
                name = f"check process of device {worker.local_rank}"
                self._report(Outcome.FAILED, f"{name} died: {how}", crashed=True, replace=True)
                return
        self._starts += 1
        if self._starts < STARTS_PER_LAUNCH:
            self._writer.append(self._starting())
            self._start_workers()
            return
        self._stop_workers()
        self._fail(how)

    def _fail(self, reason: str) -> None:
        """Say that this node can take part in no round."""
        self._writer.append(
            WorkersFailed(node=self._settings.node, launch=self._settings.launch, reason=reason)
        )

    def _stop_workers(self) -> None:
        for worker in self._workers:
            for descriptor in worker.descriptors:
                self._selector.unregister(descriptor)
            worker.kill()
            if worker.unkillable:
                self._hanging = (
                    f"the check process of device {worker.local_rank} hangs in the kernel and"
                    " cannot be killed"
                )
        self._workers = []
        self._ready = {}


def _starts_run(entry: Entry, run_id: str) -> bool:
    return isinstance(entry.record, RunStarted) and entry.record.run_id == run_id


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]
