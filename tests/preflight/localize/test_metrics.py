# SPDX-License-Identifier: Apache-2.0
"""Healthy devices differ for good: that is told, and accuses nobody."""

from __future__ import annotations

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


def test_the_floor_is_four_deviations_where_devices_differ_by_more_than_usual() -> None:
    rng = random.Random(0)
    widely = [rng.gauss(0, 0.05) for _ in range(2000)]

    assert np.log1p(floor_of(widely)) == pytest.approx(0.2, rel=0.1)


def repeated_floor(lasting: float, noise: float, *, devices: int, rounds: int) -> float:
    """Return the floor where 5 % is asked for and each device is tested once in each round."""
    rng = random.Random(0)
    own = [rng.gauss(0, lasting) for _ in range(devices)]
    tests = [(own[device] + rng.gauss(0, noise), device, number)
             for number in range(rounds) for device in range(devices)]  # fmt: skip
    log_ms, tested, numbers = (np.array(column) for column in zip(*tests, strict=True))
    return population_of(log_ms, tested, numbers, 0.05).floor


@pytest.mark.parametrize("rounds", [2, 4])
def test_the_noise_of_tests_does_not_raise_the_floor(rounds: int) -> None:
    assert repeated_floor(0.002, 0.03, devices=512, rounds=rounds) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_what_repeats_raises_the_floor_however_often_it_is_tested(rounds: int) -> None:
    floor = repeated_floor(0.04, 0.01, devices=512, rounds=rounds)

    assert np.log1p(floor) == pytest.approx(0.16, rel=0.1)


def test_a_tenth_of_slow_devices_hardly_raises_the_floor() -> None:
    rng = random.Random(0)
    tests = [(rng.gauss(0.2 if device % 10 == 0 else 0.0, 0.02), device, number)
             for number in range(4) for device in range(200)]  # fmt: skip
    log_ms, devices, rounds = (np.array(column) for column in zip(*tests, strict=True))

    assert population_of(log_ms, devices, rounds, 0.05).floor == pytest.approx(0.05, abs=0.005)


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
