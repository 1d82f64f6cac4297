# SPDX-License-Identifier: Apache-2.0
"""Healthy devices differ for good: that accuses nobody; what convicts a node beyond that."""

import random

import pytest

from slurm_health.preflight.localize.localizer import GroupResult, Level, Outcome
from slurm_health.preflight.localize.settings import DeviceKind
from tests.preflight.localize.test_localizer import run
from tests.support.rows import rows


@rows
def test_a_node_is_judged_by_how_much_slower_than_healthy_ones_a_device_of_it_is(
    slowness: float, kind: DeviceKind, level: Level, component: str, reason: str
) -> None:
    rng = random.Random(0)

    def answer(_index: int, group: tuple[str, ...]) -> GroupResult:
        return GroupResult(
            nodes=group,
            outcome=Outcome.MEASURED,
            shared_ms={"allgather": 50.0 + rng.random()},
            node_ms={
                f"matmul:device {device}": {
                    node: (slowness if (node, device) == ("n2", 3) else 1.0)
                    * (3.0 + rng.random() / 50)
                    for node in group
                }
                for device in range(8)
            },
        )

    verdict, _ = run([f"n{number}" for number in range(4)], answer, kind=kind)

    found = verdict.nodes["n2"]
    assert (found.level, found.component) == (level, component)
    assert found.reason.startswith(reason)
    assert ("slower than" in found.reason) is (level is Level.SLOW or kind is not DeviceKind.CPU)
    assert found.slowdown == pytest.approx(slowness, abs=0.05)
