# SPDX-License-Identifier: Apache-2.0
"""Nodes that are a tenth slower, where a site asks for that, are found: another round decides."""

from __future__ import annotations

import random

import pytest

from slurm_health.preflight.localize.localizer import Level, Localizer, LocalizeSettings
from slurm_health.preflight.localize.simulate import Faults, SimulatedCluster, Weather, play

NODES = [f"n{number}" for number in range(64)]


def accused(faults: Faults, *, seed: int) -> set[str]:
    """Return who is convicted where a site asks for slowdowns of 5 % to be found."""
    cluster = SimulatedCluster(NODES, faults=faults, weather=Weather(), seed=seed)
    settings = LocalizeSettings(network_floor=0.05, compute_floor=0.05, seed=seed)
    verdict, _ = play(Localizer(NODES, settings=settings), cluster)
    return {*verdict.named(Level.SLOW), *verdict.named(Level.FAULTY)}


@pytest.mark.parametrize(
    ("what", "seed"), [("compute", 3), ("compute", 4), ("network", 8), ("network", 11)]
)
def test_six_nodes_a_tenth_slower_are_found_among_64(what: str, seed: int) -> None:
    slow = random.Random(seed).sample(NODES, 6)
    times = dict.fromkeys(slow, 1.1)
    faults = Faults(network=times) if what == "network" else Faults(compute=times)

    assert accused(faults, seed=seed) == set(slow)
