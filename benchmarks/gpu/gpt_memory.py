# SPDX-License-Identifier: Apache-2.0
"""5: what a GPT of each size takes, against its estimate, and what running out of memory does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu import worker_bench
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.probe_spread import workers
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step
from slurm_health.preflight.session.gpt_sizing import (
    CONTEXT_BYTES,
    CPU,
    TABLE,
    GptModel,
    bytes_needed,
    least_free_bytes,
    to_options,
)
from slurm_health.records.probe_catalog import BUILT_IN

_PROBES = {each.name: each for each in BUILT_IN}
# Activations of so many sequences fit no device, and no machine's memory either.
_TOO_MANY_SEQUENCES = 1 << 40
# An accelerator's tokens are made on the host: those must fit.
_TOO_MANY_ON_ACCELERATORS = 1 << 14


def steps(amount: Amount) -> list[Step]:
    """Return a step for each size of GPT, and one that runs out of memory."""
    sized = [
        Step(
            name=f"{model.layers} layers of {model.hidden}, batch of {model.batch}",
            does=f"train two steps; {bytes_needed(model) / 1e9:.1f} GB are estimated",
            takes_s=40.0,
            measure=partial(_sized, model),
        )
        for model in TABLE[: amount.gpt_sizes]
    ]
    does = "train with a batch that cannot fit, then see that the same process still measures"
    return [*sized, Step(name="no memory", does=does, takes_s=60.0, measure=_without_memory)]


SECTION = Section(number=5, title="memory of the GPTs", steps=steps)


def _sized(model: GptModel, machine: Machine) -> list[Figure]:
    with workers(machine) as bench:
        small = machine.on_cpus or bool(bench.work.reduced())
        if small:
            model = replace(CPU, batch=2)  # what estimates are for is not there: see that it runs
        free_bytes = min(int(each["free_bytes"]) for each in bench.ready)
        if least_free_bytes(model) > free_bytes:
            text = f"needs {least_free_bytes(model) / 1e9:.0f} GB, {free_bytes / 1e9:.0f} are free"
            return [Figure(name="left out", value=text)]
        (sample,) = _run(bench, "gpt_fit", to_options(model))
    return compared(model, sample["figures"], small=small)


def compared(model: GptModel, fit: Mapping[str, int], *, small: bool) -> list[Figure]:
    """Return the peak beside the estimate by which the model was chosen.

    The peak is that of torch's allocator, so the driver's context, which a model is chosen with
    room for, is in neither.
    """
    peak_bytes, batch = fit["peak_bytes"], fit["micro_batch"]
    estimate_bytes = bytes_needed(model) - CONTEXT_BYTES
    wrong = ""
    if batch < model.batch and not small:
        wrong = f"only {batch} fit, though the estimate says that {model.batch} do"
    return [
        Figure(name="estimate", value=round(estimate_bytes / 1e9, 3), unit="GB"),
        Figure(name="peak", value=round(peak_bytes / 1e9, 3), unit="GB"),
        Figure(name="peak / estimate", value=round(peak_bytes / estimate_bytes, 3)),
        Figure(name="sequences that fit", value=batch, wrong=wrong),
    ]


def _without_memory(machine: Machine) -> list[Figure]:
    base = CPU if machine.on_cpus else TABLE[-1]
    batch = _TOO_MANY_SEQUENCES if machine.on_cpus else _TOO_MANY_ON_ACCELERATORS
    with workers(machine) as bench:
        said, wrong = _overfill(bench, replace(base, batch=batch))
        exact = _run(bench, "values", {})[0]["figures"]
    return [
        Figure(name="without memory", value=said, wrong=wrong),
        Figure(name="products afterwards", value=exact["products"]),
    ]


def _overfill(bench: worker_bench.Bench, model: GptModel) -> tuple[str, str]:
    """Return what the probe says, and what is wrong with that."""
    try:
        bench.run(_PROBES["gpt"], to_options(model))
    except worker_bench.Failed as err:
        return str(err), "taken for a fault of the node"
    except worker_bench.NotMeasured as err:
        said = str(err)
        return said, "" if "out of memory" in said else "it does not say that memory ran out"
    return "measured", f"{model.batch} sequences cannot fit"


def _run(
    bench: worker_bench.Bench, probe: str, options: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Return the samples of the first worker."""
    try:
        return bench.run(_PROBES[probe], options)[0]
    except worker_bench.NotMeasured as err:
        raise NotMeasured(str(err)) from err
