# SPDX-License-Identifier: Apache-2.0
"""Healthy devices differ for good: that accuses nobody; what convicts a node beyond that."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from slurm_health.preflight.localize.localizer import (
    GroupResult,
    Level,
    Localizer,
    Outcome,
)
from slurm_health.preflight.localize.metrics import population_of
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


def floor_of(deviations: list[float]) -> float:
    devices = np.arange(len(deviations), dtype=np.int64)
    return population_of(np.array(deviations), devices, np.zeros_like(devices), 0.12).floor


def repeated_floor(lasting: float, noise: float, *, devices: int, rounds: int) -> float:
    """Return the floor where 5 % is asked for and each device is tested once in each round."""
    rng = random.Random(0)
    own = [rng.gauss(0, lasting) for _ in range(devices)]
    tests = [(own[device] + rng.gauss(0, noise), device, number)
             for number in range(rounds) for device in range(devices)]  # fmt: skip
    log_ms, tested, numbers = (np.array(column) for column in zip(*tests, strict=True))
    return population_of(log_ms, tested, numbers, 0.05).floor


@pytest.mark.parametrize(
    ("lasting", "noise", "rounds", "floor"),
    [
        (0.002, 0.03, 2, 0.05),  # the noise of tests does not raise the floor
        (0.002, 0.03, 4, 0.05),
        (0.04, 0.01, 1, math.expm1(0.16)),  # what repeats does: by four deviations
        (0.04, 0.01, 2, math.expm1(0.16)),
        (0.04, 0.01, 4, math.expm1(0.16)),
    ],
)
def test_the_floor_rises_with_what_devices_differ_by_for_good(
    lasting: float, noise: float, rounds: int, floor: float
) -> None:
    made = repeated_floor(lasting, noise, devices=512, rounds=rounds)

    assert made == pytest.approx(floor, rel=0.1, abs=0.01)


@pytest.mark.parametrize(
    "deviations",
    [
        [0.0],
        [0.0, 0.5],
        [0.0, 0.01, 0.5],
        [0.0, 0.01, 0.5, 0.5],
        [0.0, 0.005, 0.01, 0.5, 0.5],
    ],
)
def test_slow_devices_among_few_do_not_hide_themselves(deviations: list[float]) -> None:
    assert floor_of(deviations) == 0.12
