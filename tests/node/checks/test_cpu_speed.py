# SPDX-License-Identifier: Apache-2.0
"""The speed of the processors: what is the node's fault, and what other work or nobody knows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.cpu_speed import CpuSample, CpuSpeed, sample_cpus
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import Unmeasured
from tests.support.sites import tree

QUIET = CpuSample(processors=4, wall_s=0.5, cpu_s=2.0, rounds=4_000_000, throttled_s=0, others_s=0)
CHECK = CpuSpeed(min_rounds_per_s=1_500_000)


def seen(**changes: float) -> CpuSample:
    return msgspec.structs.replace(QUIET, **changes)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({}, Status.PASS, "2000000 rounds/s per processor, limit 1500000"),
        ({"rounds": 2_000_000}, Status.NODE_FAULT, "1000000 rounds/s"),
        ({"rounds": 2_000_000, "others_s": 0.5}, Status.INCONCLUSIVE, "other work takes 25 %"),
        ({"cpu_s": 0.4, "throttled_s": 1.2}, Status.NODE_FAULT, "get 20 % of 4 processors"),
        ({"cpu_s": 0.4, "others_s": 1.6}, Status.INCONCLUSIVE, "busy with other work"),
        ({"cpu_s": 0.4}, Status.INCONCLUSIVE, "busy with other work"),
        ({"cpu_s": 1.2, "rounds": 2_400_000, "others_s": 0.8}, Status.PASS, "2000000 rounds/s"),
    ],
)
def test_only_a_quota_or_a_quiet_and_slow_node_is_at_fault(
    changes: dict[str, float], status: Status, said: str
) -> None:
    found = CHECK.judge(seen(**changes))
    assert found.status is status
    assert said in found.text


def test_without_a_figure_to_compare_with_speed_is_not_judged() -> None:
    found = CpuSpeed().judge(seen(rounds=1))
    assert found.status is Status.INCONCLUSIVE
    assert "min_rounds_per_s is not set" in found.text


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu a b c d e f g h\n"])
def test_a_garbled_account_of_the_processors_is_unmeasured(tmp_path: Path, text: str) -> None:
    with pytest.raises(Unmeasured):
        CpuSpeed().measure(tree(tmp_path, {"/proc/stat": text}))


def test_this_machine_can_be_measured() -> None:
    found = sample_cpus(CheckContext(), 0.1)
    assert found.rounds > 0
    assert 0 < found.share <= 1.1
    assert found.others_s >= 0
