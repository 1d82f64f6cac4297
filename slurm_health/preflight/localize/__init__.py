# SPDX-License-Identifier: Apache-2.0
"""From evidence to a verdict: who runs with whom next, who is bad, what nobody can tell.

    localizer            the face: next_round, observe, verdict
    settings             what may be set, each constant with where it comes from
    evidence             results of groups -> trials; what of nodes and network each is about
    belief_propagation   probabilities of many causes from many trials
    slowness             who is slow, from times
    metrics              which times can be compared with each other, and what they say
    uplinks              what slow nodes have in common, where no topology says it
    conviction           what is proven beyond doubt
    findings             levels: what is proven, what is open, who can be trusted
    explain              findings about nodes -> sentences
    wording              what findings are worded with; those about paths and uplinks -> sentences
    pairing              who runs with whom
    stopping             which pairs are still needed, and when there is nothing left to learn
    simulate             a cluster that does not exist, to try all this on

The names below are the interface for anyone who drives it. They are loaded when asked for: numpy
is not free, and most processes only want the settings.
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
    """Load one name of the interface.

    Raises:
        AttributeError: it is none.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
