# SPDX-License-Identifier: Apache-2.0
"""What healthy devices of each model do here, as tables for the site's file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from slurm_health.fleet.standing.baseline import (
    COPY,
    FRACTION,
    LEAST_DEVICES,
    LEAST_NODES,
    MATMUL,
    Baseline,
    Limits,
    limits,
)
from slurm_health.preflight.expectations import Expectation, expectation_of

_SHOWN = {MATMUL: (1e-3, "TFLOP/s"), COPY: (1.0, "GB/s")}


def toml(
    found: Mapping[str, Mapping[str, Baseline]], known: Mapping[str, Expectation], *, period: str
) -> str:
    """Return a table for each model; as a comment only, where too few of it were checked."""
    if not found:
        return f"# no accelerator was found healthy in the {period}\n"
    tables = [
        _table(model, each, limits(model, each, expectation_of(model, known), period=period))
        for model, each in sorted(found.items())
    ]
    return "\n".join(tables)


def _table(model: str, found: Mapping[str, Baseline], limits: Limits | None) -> str:
    told = [f"# {_described(each)}" for _, each in sorted(found.items())]
    if limits is None:
        needed = f"{LEAST_DEVICES} on {LEAST_NODES} nodes are needed"
        return "\n".join([f"# {model}: too few devices for a limit: {needed}", *told, ""])
    settings: Sequence[tuple[str, object]] = (
        ("bf16_tflop_per_s", limits.bf16_tflop_per_s),
        ("memory_gb_per_s", limits.memory_gb_per_s),
        ("healthy_fraction", FRACTION),
        ("basis", limits.basis),
    )
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings if value is not None]
    return "\n".join([f"[expectations.{json.dumps(model)}]", *told, *lines, ""])


def _described(found: Baseline) -> str:
    scale, unit = _SHOWN[found.metric]
    name = found.metric.split()[0]
    return (
        f"{name}: {found.devices} devices on {found.nodes} nodes,"
        f" median {found.typical * scale:.4g} {unit}, lowest {found.least * scale:.4g}"
    )
