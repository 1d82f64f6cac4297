# SPDX-License-Identifier: Apache-2.0
"""How much repeated runs of each probe differ on this machine's devices, when nothing else runs.

    python -m benchmarks.probes                          every probe, 10 runs
    python -m benchmarks.probes --only matmul --runs 30
    python -m benchmarks.probes --python VENV/bin/python with another torch

The probes run in the agent's own workers, one per device (two on a machine without accelerators),
one probe after another. A run is reduced as in a check: for the slowest worker, the median of the
windows of a device's own work, or the lower quartile of a collective. Spread is the standard
deviation divided by the mean. Exits 0 if every probe was measured, 3 if one was not.
"""

from __future__ import annotations

import argparse
import os
import platform
import selectors
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tabulate import tabulate

from benchmarks.command import count
from slurm_health.preflight.agent import node_facts
from slurm_health.preflight.agent.worker_process import Worker, end_together
from slurm_health.preflight.session.gpt_sizing import (
    CPU,
    GptModel,
    TooLittleMemory,
    choose,
    to_options,
)
from slurm_health.preflight.session.measurement import reduced_ms
from slurm_health.preflight.session.work_sizing import work_for
from slurm_health.records.probe_catalog import BUILT_IN, Probe, Scope
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
                ended = worker.ended()
                events.extend(msgspec.to_builtins(event) for event in worker.read_events())
                if ended is not None:
                    raise NotMeasured(f"the worker of device {worker.local_rank} {ended}")
        return said


def main() -> int:
    """Measure, print the table, return the exit code."""
    options = _parser().parse_args()
    probes = [each for each in present() if not options.only or each.name in options.only]
    try:
        bench = Bench(options.python, options.workers, os.environ)
    except NotMeasured as err:
        print(f"benchmarks.probes: no worker: {err}", file=sys.stderr)
        return 3
    print(_machine(bench), end="\n\n", flush=True)
    try:
        rows, missing = measure(bench, probes, options.runs)
    finally:
        bench.close()
    print(table(rows))
    for line in missing:
        print(f"not measured: {line}")
    return 3 if missing else 0


def present() -> list[Probe]:
    """Return the probes whose file is there."""
    return list(BUILT_IN)


def measure(bench: Bench, probes: Sequence[Probe], runs: int) -> tuple[list[Row], list[str]]:
    """Return a row for each quantity, and a line for each probe that gave none."""
    rows: list[Row] = []
    missing: list[str] = []
    options: dict[str, object] = {"burn_s": BURN_S}
    for probe in probes:
        try:
            if probe.name.startswith("gpt"):
                options |= model_options(bench)
            rows += rows_of(bench, probe, options, runs)
        except NotMeasured as err:
            missing.append(f"{probe.name}: {err}")
    return rows, missing


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
        return dict(to_options(CPU))
    free_bytes = min(int(each["free_bytes"]) for each in bench.ready)
    chosen = choose(free_bytes, min(float(each["gflop_per_s"]) for each in bench.ready))
    if isinstance(chosen, TooLittleMemory):
        raise NotMeasured(str(chosen))
    assert isinstance(chosen, GptModel)
    return dict(to_options(chosen))


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
            elapsed_ms = reduced_ms(sample)
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


def table(rows: Sequence[Row]) -> str:
    """Return the table."""
    headers = [
        "probe",
        "runs",
        "median ms",
        "min … max ms",
        "spread",
        "TFLOP/s",
        "GB/s moved",
        "figures",
    ]
    return tabulate(
        [_line(row) for row in rows], headers=headers, tablefmt="github", disable_numparse=True
    )


def _line(row: Row) -> list[str]:
    figures = ", ".join(f"{name} {value}" for name, value in row.figures.items())
    if not row.times_ms:
        return [row.name, "", "", "", "", "", "", figures]
    middle = statistics.median(row.times_ms)
    return [
        row.name,
        str(len(row.times_ms)),
        f"{middle:.3f}",
        f"{min(row.times_ms):.3f} … {max(row.times_ms):.3f}",
        f"{row.spread:.2%}",
        f"{row.flop / middle / 1e9:.3g}" if row.flop else "",
        f"{row.total_bytes / middle / 1e6:.4g}" if row.total_bytes else "",
        figures,
    ]


def _machine(bench: Bench) -> str:
    first = bench.ready[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, {len(bench.workers)} x {first['model']},"
        f" torch {first['torch']}, {first['collective_library']},"
        f" {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.2f} at the"
        f" start, Linux {platform.release()}"
    )


def _parser() -> argparse.ArgumentParser:
    names = [each.name for each in present()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probes",
        description="How far the runs of each probe lie apart on this machine's devices.",
        epilog=f"probes: {', '.join(names)}",
    )
    parser.add_argument("--runs", type=count, default=10, metavar="K", help="of each probe [10]")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="PROBE", help="this probe; repeatable"
    )
    parser.add_argument(
        "--workers", type=count, metavar="N", help="[one per accelerator, two without any]"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="that has torch [this one]"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
