# SPDX-License-Identifier: Apache-2.0
"""Runs of probes in the agent's own workers, one per device, reduced as in a check.

A run is reduced for the slowest worker: to the median of the windows of a device's own work, or the
lower quartile of a collective. Spread is the standard deviation divided by the mean.
"""

from __future__ import annotations

import selectors
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.worker_process import Line, Worker, end_together
from slurm_health.preflight.probes.sizes import CPU, choose, work_for
from slurm_health.preflight.session.measurement import group_times
from slurm_health.records.probe_catalog import Probe, Scope
from slurm_health.records.records import Sampled, WorkersReady

START_LIMIT_S = 120.0
ROUND_LIMIT_S = 300.0
CPU_WORKERS = 2
BURN_S = 3.0
_ADDRESS = "127.0.0.1"


class NotMeasured(Exception):
    """A probe gave no figure; the text says why."""


class Failed(NotMeasured):
    """A probe found its device at fault, or crashed; the text says which."""


@dataclass(kw_only=True)
class Row:
    """One quantity of one probe: a time per run, and what one iteration does."""

    name: str
    times_ms: list[float] = field(default_factory=list)
    flop: float = 0.0
    total_bytes: int = 0
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """Standard deviation of the times, divided by their mean."""
        return statistics.pstdev(self.times_ms) / statistics.fmean(self.times_ms)


class Bench:
    """The workers of this machine."""

    def __init__(self, python: str, workers: int | None, environ: Mapping[str, str]) -> None:
        devices = node_facts.device_count(environ)
        count = workers or devices or CPU_WORKERS
        threads = max(1, node_facts.usable_cpus(environ) // count)
        own = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
        self._selector = selectors.DefaultSelector()
        self._round = 0
        self.workers = [
            Worker(python=python, local_rank=rank, threads=threads, devices=devices, environ=own)
            for rank in range(count)
        ]
        for worker in self.workers:
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ)
        self.ready = [found[-1] for found in self._events("ready", START_LIMIT_S)]
        # Each worker alone, as if it were a node: so much work as a check would give them.
        self.work = work_for([_as_node(each) for each in self.ready])

    def run(self, probe: Probe, options: Mapping[str, object]) -> list[list[dict[str, Any]]]:
        """Return the samples that each worker takes of one probe.

        Raises:
            NotMeasured: a worker took none.
            Failed: its probe failed.
        """
        self._round += 1
        for worker in self.workers:
            worker.send(self._command(probe, options, worker.local_rank))
        said = self._events("done", ROUND_LIMIT_S)
        for events in said:
            outcome, detail = events[-1]["outcome"], events[-1]["detail"]
            if outcome != "measured":
                raise (Failed if outcome == "failed" else NotMeasured)(detail or outcome)
        return [[each for each in events if each["event"] == "sample"] for events in said]

    def close(self) -> None:
        """End the workers."""
        end_together(self.workers)

    def _command(self, probe: Probe, options: Mapping[str, object], rank: int) -> dict[str, object]:
        group = {
            "rank": rank,
            "world_size": len(self.workers),
            "address": _ADDRESS,
            "port": self.ready[0]["store_port"],
            "prefix": f"bench/{self._round}",
        }
        return {
            "op": "round",
            "round": self._round,
            "timeout_s": ROUND_LIMIT_S,
            "local_size": len(self.workers),
            "options": {**self.work.options(), **options},
            "probes": [{"name": probe.name, "scope": probe.scope.value, "path": probe.path}],
            "groups": {scope.value: group for scope in Scope if scope is not Scope.SOLO},
        }

    def _events(self, last: str, limit_s: float) -> list[list[dict[str, Any]]]:
        """Return what each worker says until its event of that kind."""
        said: list[list[dict[str, Any]]] = [[] for _ in self.workers]
        give_up = time.monotonic() + limit_s
        while not all(events and events[-1]["event"] == last for events in said):
            if time.monotonic() > give_up:
                raise NotMeasured(f"no answer within {limit_s:.0f} s")
            self._selector.select(1.0)
            for worker, events in zip(self.workers, said, strict=True):
                # In this order: what a worker said before it ended is read.
                gone = worker.gone()
                events.extend(map(_plain, worker.read_lines()))
                if gone is not None:
                    raise NotMeasured(f"the worker of device {worker.local_rank} {gone.how}")
        return said


def _plain(line: Line | Sampled) -> dict[str, Any]:
    """Return a line as a dictionary; what a worker measured alone as the event `sample`."""
    if not isinstance(line, Sampled):
        builtins: dict[str, Any] = msgspec.to_builtins(line)
        return builtins
    fields = msgspec.structs.asdict(line)
    return {**fields, "event": "sample", "iteration_ms": line.iteration_ms[0]}


def _as_node(ready: Mapping[str, Any]) -> WorkersReady:
    return WorkersReady(
        node="",
        launch=0,
        store_port=0,
        torch=ready["torch"],
        backend=ready["backend"],
        devices=[ready["device"]],
        free_bytes=ready["free_bytes"],
        gflop_per_s=ready["gflop_per_s"],
        memory_gb_per_s=ready["memory_gb_per_s"],
    )


def model_options(bench: Bench) -> dict[str, object]:
    """Return the options of the GPT that these devices would get in a check."""
    if bench.ready[0]["backend"] == "gloo":
        return dict(CPU.options())
    free_bytes = min(int(each["free_bytes"]) for each in bench.ready)
    chosen = choose(free_bytes, min(float(each["gflop_per_s"]) for each in bench.ready))
    return dict(chosen.options())


def rows_of(bench: Bench, probe: Probe, options: Mapping[str, object], runs: int) -> list[Row]:
    """Run one probe again and again; return a row for each of its quantities.

    Raises:
        NotMeasured: a run gave no figure.
    """
    rows: dict[str, Row] = {}
    # The first run finds cold caches and a device that has not settled.
    for index in range(runs + 1):
        for each in _by_quantity(bench.run(probe, options)):
            sample = _sampled(each)
            name = f"{probe.name} {sample.quantity}".strip()
            row = rows.setdefault(name, Row(name=name))
            times = group_times([sample.node], [sample])
            elapsed_ms = max((timed.own_ms for timed in times), default=None)
            row.flop, row.total_bytes, row.figures = sample.flop, sample.total_bytes, sample.figures
            if index and elapsed_ms is not None:
                row.times_ms.append(elapsed_ms)
    return list(rows.values())


def _by_quantity(said: Sequence[Sequence[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the samples of each quantity; some probes take theirs on the first worker only."""
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in (sample for samples in said for sample in samples):
        found.setdefault(sample["quantity"], []).append(sample)
    return list(found.values())


def _sampled(events: Sequence[Mapping[str, Any]]) -> Sampled:
    """Return one quantity of all workers as the agent records it."""
    first = events[0]
    return Sampled(
        node="here",
        round=0,
        group=["here"],
        probe=first["probe"],
        quantity=first["quantity"],
        scope=first["scope"],
        iteration_ms=[each["iteration_ms"] for each in events],
        world_size=first["world_size"],
        total_bytes=first["total_bytes"],
        flop=first["flop"],
        figures=first["figures"],
    )
