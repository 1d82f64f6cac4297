# SPDX-License-Identifier: Apache-2.0
"""1: how fast each probe is, which share of the peak that is, and how far its runs lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.gpu import worker_bench
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step
from slurm_health.records.probe_catalog import BUILT_IN

_PROBES = {each.name: each for each in BUILT_IN}
# The probe matmul warms up for 3 s before a burn of this length, else for 0.5 s.
_LONG_WARM_UP = {"burn_s": 3.0}


def steps(amount: Amount) -> list[Step]:
    """Return one step for each probe, and one more for products after a long warm-up."""
    return [
        _step("values", "values", amount, takes_s=60.0),
        _step("matmul, 0.5 s of warm-up", "matmul", amount, takes_s=80.0),
        _step("matmul, 3 s of warm-up", "matmul", amount, takes_s=240.0, options=_LONG_WARM_UP),
        _step("memory_copy", "memory_copy", amount, takes_s=40.0),
        _step("gpt_fit", "gpt_fit", amount, takes_s=180.0),
    ]


SECTION = Section(number=1, title="speed and spread of the probes", steps=steps)


def _step(
    name: str, probe: str, amount: Amount, *, takes_s: float, options: Mapping[str, object] = {}
) -> Step:
    def measure(machine: Machine) -> list[Figure]:
        return _measured(machine, name, probe, options, amount.runs)

    does = f"run the probe {probe} {amount.runs} times in one worker per device"
    return Step(name=name, does=does, takes_s=takes_s, measure=measure)


@contextmanager
def workers(machine: Machine) -> Iterator[worker_bench.Bench]:
    """Provide a worker for each device, one on CPUs.

    Raises:
        NotMeasured: a worker does not start.
    """
    try:
        bench = worker_bench.Bench(machine.python, 1 if machine.on_cpus else None, machine.environ)
    except worker_bench.NotMeasured as err:
        raise NotMeasured(str(err)) from err
    try:
        yield bench
    finally:
        bench.close()


def _measured(
    machine: Machine, name: str, probe: str, options: Mapping[str, object], runs: int
) -> list[Figure]:
    with workers(machine) as bench:
        try:
            shape = worker_bench.model_options(bench) if probe.startswith("gpt") else {}
            rows = worker_bench.rows_of(bench, _PROBES[probe], {**options, **shape}, runs)
        except worker_bench.Failed as err:
            return [Figure(name=name, value="failed", wrong=f"on a healthy device: {err}")]
        except worker_bench.NotMeasured as err:
            raise NotMeasured(str(err)) from err
    return [figure for row in rows for figure in _figures(machine, name, row)]


def _figures(machine: Machine, name: str, row: worker_bench.Row) -> Iterator[Figure]:
    for key, value in row.figures.items():
        yield Figure(name=f"{name}: {key}", value=value if isinstance(value, int) else str(value))
    if not row.times_ms:
        return
    median_ms = statistics.median(row.times_ms)
    yield Figure(name=f"{name}: median", value=round(median_ms, 4), unit="ms")
    yield Figure(name=f"{name}: spread", value=round(100 * row.spread, 3), unit="%")
    tflop_per_s, gb_per_s = row.flop / median_ms / 1e9, row.total_bytes / median_ms / 1e6
    expected = machine.expectation
    if row.flop:
        peak = expected.bf16_tflop_per_s if expected else None
        yield from _rate(machine, name, tflop_per_s, "TFLOP/s", peak)
    if row.total_bytes:
        peak = expected.memory_gb_per_s if expected else None
        yield from _rate(machine, name, gb_per_s, "GB/s", peak)


def _rate(
    machine: Machine, name: str, rate: float, unit: str, peak: float | None
) -> Iterator[Figure]:
    yield Figure(name=f"{name}: rate", value=float(f"{rate:.4g}"), unit=unit)
    if not peak or machine.expectation is None:
        return
    least = machine.expectation.healthy_fraction
    wrong = f"below the {least:.0%} that its model is held to" if rate < least * peak else ""
    share = round(100 * rate / peak, 2)
    yield Figure(name=f"{name}: share of the peak", value=share, unit="%", wrong=wrong)
