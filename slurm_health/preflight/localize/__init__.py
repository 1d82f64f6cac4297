# SPDX-License-Identifier: Apache-2.0
"""From evidence to a verdict: the pairs of the next round, the bad nodes, the undecided ones.

    localizer            the interface: next_round, observe, verdict
    settings             the settings of a site, the constants and their sources
    evidence             results of groups -> trials; the nodes and links that they involve
    belief_propagation   probabilities of many causes from many trials
    slowness             slow nodes, from times
    metrics              comparable times, and what they show
    uplinks              uplinks without a topology, from what slow nodes have in common
    conviction           what is proven beyond doubt
    findings             levels: proven, open, trusted
    explain              conclusions -> sentences
    pairing              the pairs of a round
    stopping             the pairs still needed, and the end
    simulate             a simulated cluster

The names below are the interface. They load on first use: numpy is not free, and most processes
only need the settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_health.preflight.localize.localizer import Localizer
    from slurm_health.preflight.localize.settings import LocalizeSettings
    from slurm_health.records.verdict import (
        GroupResult,
        Level,
        NodeVerdict,
        Outcome,
        Round,
        Verdict,
    )

_HOMES = {
    "Localizer": "slurm_health.preflight.localize.localizer",
    "LocalizeSettings": "slurm_health.preflight.localize.settings",
    "Round": "slurm_health.records.verdict",
    "GroupResult": "slurm_health.records.verdict",
    "Level": "slurm_health.records.verdict",
    "NodeVerdict": "slurm_health.records.verdict",
    "Outcome": "slurm_health.records.verdict",
    "Verdict": "slurm_health.records.verdict",
}
__all__ = [
    "GroupResult",
    "Level",
    "LocalizeSettings",
    "Localizer",
    "NodeVerdict",
    "Outcome",
    "Round",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    """Load a name of the interface.

    Raises:
        AttributeError: it is no name of the interface.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
