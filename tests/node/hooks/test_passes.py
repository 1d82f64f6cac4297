# SPDX-License-Identifier: Apache-2.0
"""Hooks of a site where a node that has passed is not checked again at once."""

from __future__ import annotations

import pytest

from tests.support.accusing import Story, journal
from tests.support.hooked_node import Node


@pytest.fixture
def node(node: Node) -> Node:
    """One that a prolog has just checked, and found well."""
    node.passed_min = 5
    assert not node.prolog()
    return node


def is_checked(node: Node, *, gpus: str | None = None) -> bool:
    """Tell whether a prolog looks at the node, by a fault that it would find."""
    node.break_it()
    try:
        return node.prolog() if gpus is None else node.prolog(SLURM_JOB_GPUS=gpus)
    finally:
        node.mend()


def test_a_node_that_has_passed_is_let_off_for_a_while(node: Node) -> None:
    node.wait(4.9)
    assert not is_checked(node)
    node.wait(0.2)
    assert is_checked(node)


def test_without_the_setting_every_job_has_its_node_checked(node: Node) -> None:
    node.passed_min = 0
    assert is_checked(node)


def test_it_counts_from_the_check_and_not_from_who_was_let_off(node: Node) -> None:
    node.wait(4)
    assert not node.prolog()
    node.wait(4)
    assert is_checked(node)


def test_after_a_reboot_it_is_checked(node: Node) -> None:
    node.wait(1, boot="b-2")
    assert is_checked(node)


def test_another_file_of_the_site_means_other_checks(node: Node) -> None:
    node.more = "[checks.swap]\n"
    assert is_checked(node)


def test_other_gpus_are_another_check(node: Node) -> None:
    assert not node.prolog(SLURM_JOB_GPUS="0")
    assert not is_checked(node, gpus="0")
    assert is_checked(node, gpus="1")


def test_a_fault_that_the_health_check_finds_ends_it(node: Node) -> None:
    node.wait(1)
    node.break_it()
    assert node.healthcheck()
    node.mend()
    assert is_checked(node)


def test_a_health_check_that_passes_does_not_stand_for_a_prolog(node: Node) -> None:
    node.wait(6)
    assert not node.healthcheck()
    assert is_checked(node)


@pytest.mark.parametrize("more", ["severity='warn'", "shadow=true"])
def test_whatever_is_not_a_pass_has_the_next_job_checked(node: Node, more: str) -> None:
    node.more = f"[checks.low]\ncheck='memory'\nmin_total_gib=9999\n{more}\n"
    for _ in range(2):
        assert not node.prolog()
        assert "check=low" in node.said


def test_an_accusation_has_the_node_checked(node: Node, story: Story) -> None:
    node.prolog()
    assert not is_checked(node)
    node.wait(1)
    story.write(journal())
    story.ended()
    assert "accuses this node" in node.said
    assert is_checked(node)
