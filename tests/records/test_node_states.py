# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.node_states import is_down, is_lost, words_of
from slurm_health.system.slurm.parsing import node_of

RECORDED = Path(__file__).parents[1] / "data" / "slurm-22.05" / "nodes-down-and-idle.txt"


def test_the_words_of_a_state_are_told_without_its_marks() -> None:
    assert words_of("DOWN*+DRAIN+CLOUD") == {"DOWN", "DRAIN", "CLOUD"}
    assert words_of("") == frozenset()


def test_nodes_that_slurm_really_lost_are_lost_and_only_one_of_them_is_down() -> None:
    nodes = [node for line in RECORDED.read_text().splitlines() if (node := node_of(line))]

    assert [(node.state, is_lost(node.state), is_down(node.state)) for node in nodes] == [
        ("DOWN", True, True),
        ("IDLE+NOT_RESPONDING", True, False),
    ]


@pytest.mark.parametrize(
    "state", ["DOWN*", "DOWN+CLOUD+POWERED_DOWN", "ALLOCATED*", "MIXED+DRAIN+NOT_RESPONDING"]
)
def test_a_node_that_is_down_or_does_not_answer_is_lost(state: str) -> None:
    assert is_lost(state)


@pytest.mark.parametrize(
    "state",
    [
        "ALLOCATED",
        "ALLOCATED+CLOUD+POWER_DOWN",
        "MIXED+CLOUD+POWER_DRAIN",
        "ALLOCATED+FAIL",
        "FAILING",
        "IDLE+POWERED_DOWN",
        "IDLE~",
        "MIXED+DRAIN+INVALID_REG",
        "ALLOCATED+MAINTENANCE",
        "",
    ],
)
def test_a_node_with_a_mark_for_what_is_to_come_is_not_lost(state: str) -> None:
    assert not is_lost(state)
    assert not is_down(state)


@pytest.mark.parametrize(
    "silenced", ["MIXED+CLOUD+NOT_RESPONDING+POWERING_UP", "IDLE+NOT_RESPONDING+REBOOT_ISSUED"]
)
def test_a_node_that_slurm_boots_for_another_job_is_silent_and_not_lost(silenced: str) -> None:
    assert not is_lost(silenced)
