# SPDX-License-Identifier: Apache-2.0
"""5: what a GPT of each size takes, and what running out of memory does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import worker_bench
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.probe_spread import workers
from benchmarks.gpu.step import Amount, Figure, NotMeasured, Section, Step
from slurm_health.preflight.probes.sizes import CPU, TABLE, GptModel
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
            does=f"train two steps on a device with {least_gb:.1f} GB free",
            takes_s=40.0,
            measure=partial(_sized, least_gb, model),
        )
        for least_gb, model in TABLE[: amount.gpt_sizes]
    ]
    does = "train with a batch that cannot fit, then see that the same process still measures"
    return [*sized, Step(name="no memory", does=does, takes_s=60.0, measure=_without_memory)]


SECTION = Section(number=5, title="memory of the GPTs", steps=steps)


def _sized(least_gb: float, model: GptModel, machine: Machine) -> list[Figure]:
    with workers(machine) as bench:
        small = machine.on_cpus or bool(bench.work.reduced())
        if small:
            model = CPU._replace(
                batch=2
            )  # what the row is meant for is not there: see that it runs
        free_bytes = min(int(each["free_bytes"]) for each in bench.ready)
        if least_gb * 1e9 > free_bytes and not small:
            text = f"is meant for {least_gb:.0f} GB, {free_bytes / 1e9:.0f} are free"
            return [Figure(name="left out", value=text)]
        (sample,) = _run(bench, "gpt_fit", model.options())
    return fitted(model, sample["figures"], small=small)


def fitted(model: GptModel, fit: Mapping[str, int], *, small: bool) -> list[Figure]:
    """Return the peak of torch's allocator, and the batch that fits beside that of the row."""
    wrong = ""
    if fit["micro_batch"] < model.batch and not small:
        wrong = f"only {fit['micro_batch']} fit, though the row has {model.batch}"
    return [
        Figure(name="peak", value=round(fit["peak_bytes"] / 1e9, 3), unit="GB"),
        Figure(name="sequences that fit", value=fit["micro_batch"], wrong=wrong),
    ]


def _without_memory(machine: Machine) -> list[Figure]:
    base = CPU if machine.on_cpus else TABLE[-1][1]
    batch = _TOO_MANY_SEQUENCES if machine.on_cpus else _TOO_MANY_ON_ACCELERATORS
    with workers(machine) as bench:
        said, wrong = _overfill(bench, base._replace(batch=batch))
        exact = _run(bench, "values", {})[0]["figures"]
    return [
        Figure(name="without memory", value=said, wrong=wrong),
        Figure(name="products afterwards", value=exact["products"]),
    ]


def _overfill(bench: worker_bench.Bench, model: GptModel) -> tuple[str, str]:
    """Return what the probe says, and what is wrong with that."""
    try:
        bench.run(_PROBES["gpt"], model.options())
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
