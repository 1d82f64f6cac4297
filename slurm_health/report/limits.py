# SPDX-License-Identifier: Apache-2.0
"""How much slower than its peers a node had to be in a check to be called slow."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_health.preflight.localize.settings import USUAL, Device
from slurm_health.report.measured import ALLGATHER, MATMUL
from slurm_health.report.model import RunReport

_SETTINGS = {ALLGATHER: "network_floor", MATMUL: "compute_floor"}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The smallest relative slowdown that made a node slow, and the least it could have been."""

    floor: float
    least: float

    @property
    def raised(self) -> bool:
        """Tell whether devices that are well differed so much that the limit was raised."""
        return self.floor > self.least * 1.005  # the journal rounds it

    def text(self) -> str:
        """Return it as the end of a sentence."""
        why = f", raised from {100 * self.least:.0f} %: the devices here differ that much"
        return f"slow if it takes {100 * self.floor:.0f} % longer{why if self.raised else ''}"


def limit_of(run: RunReport, probe: str) -> Limit:
    """Return the limit of a probe: what the verdict names, else what the check was told."""
    name = _SETTINGS.get(probe, "compute_floor")
    usual = USUAL[_device(run)]
    chosen = run.started.settings.get(name) if run.started else None
    least = _number(chosen)
    if least is None:
        least = usual.network_floor if name == "network_floor" else usual.compute_floor
    recorded = [
        floor
        for metric, floor in run.floors.items()
        if metric == probe or metric.startswith((f"{probe} on ", f"{probe}:"))
    ]
    return Limit(floor=max(recorded, default=least), least=least)


def _number(value: object) -> float | None:
    """Return a setting as it was recorded, None where it is no number."""
    try:
        return float(str(value))
    except ValueError:
        return None


def _device(run: RunReport) -> Device:
    """Return what a check's nodes computed with: only accelerators have names of their own."""
    watched = any(node.hardware and node.hardware.devices for node in run.nodes)
    models = {node.hardware.model for node in run.nodes if node.hardware}
    cpu = any("thread" in model for model in models)
    return Device.ACCELERATOR if watched or not cpu else Device.CPU
