# SPDX-License-Identifier: Apache-2.0
"""Healthy devices differ for good: that accuses nobody; what convicts a node beyond that."""

from __future__ import annotations

import random

import pytest

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    Outcome,
)
from slurm_health.preflight.localize.settings import DeviceKind, settings_from
from slurm_health.records.verdict import Verdict

DEVICES = 8


def alone(slowness: float, kind: DeviceKind = DeviceKind.ACCELERATOR) -> Verdict:
    """Return the verdict on four nodes of which n2 has one device that is slower by this factor."""
    nodes = [f"n{number}" for number in range(4)]
    loc = Localizer(nodes, settings=settings_from({}, kind=kind))
    rng = random.Random(0)
    while (round_ := loc.next_round()) is not None:
        results = [
            GroupResult(
                nodes=group,
                outcome=Outcome.MEASURED,
                shared_ms={"allgather": 50.0 + rng.random()},
                node_ms={
                    f"matmul:device {device}": {
                        node: (slowness if (node, device) == ("n2", 3) else 1.0)
                        * (3.0 + rng.random() / 50)
                        for node in group
                    }
                    for device in range(DEVICES)
                },
            )
            for group in round_.groups
        ]
        loc.observe(round_.index, results)
    return loc.verdict()


def test_a_device_within_what_healthy_ones_differ_by_is_told_and_its_node_is_healthy() -> None:
    found = alone(1.07).nodes["n2"]

    assert found.level is Level.HEALTHY
    assert found.reason == (
        "matmul:device 3 is 6.9 % slower than its peers, within what healthy devices differ by"
    )
    assert found.slowdown == pytest.approx(1.07, abs=0.01)


def test_a_share_of_processors_that_others_use_is_no_word_against_a_node() -> None:
    found = alone(1.6, kind=DeviceKind.CPU).nodes["n2"]

    assert found.level is Level.HEALTHY
    assert found.reason.startswith("passed with")
    assert "slower than" not in found.reason
    assert found.slowdown == pytest.approx(1.6, abs=0.05)  # a spare is chosen before it


def test_a_device_outside_of_what_healthy_ones_differ_by_is_named() -> None:
    found = alone(1.2).nodes["n2"]

    assert found.level is Level.SLOW
    assert found.component == "compute device 3"
