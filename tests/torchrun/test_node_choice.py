# SPDX-License-Identifier: Apache-2.0
"""Which nodes training starts with."""

from __future__ import annotations

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.torchrun.node_choice import Bounds, bounds, choose

LEVELS = {
    "h": Level.HEALTHY,
    "s": Level.SLOW,
    "f": Level.FAULTY,
    "i": Level.INCONCLUSIVE,
}


def verdict(levels: str) -> VerdictReached:
    """One node per letter, n1 first."""
    return VerdictReached(
        nodes=[
            NodeVerdict(node=f"n{number}", level=LEVELS[letter], reason="because")
            for number, letter in enumerate(levels, 1)
        ]
    )


@pytest.mark.parametrize(
    ("levels", "nnodes", "exclude_slow", "absent", "expected"),
    [
        ("hhhh", None, False, "", "n1 n2 n3 n4"),
        ("hhfh", "3:4", False, "", "n1 n2 n4"),
        ("fhhh", "3:4", False, "", "n2 n3 n4"),
        ("hhfh", None, False, "", ""),
        ("hffh", "3:4", False, "", ""),
        ("hhsh", None, False, "", "n1 n2 n3 n4"),
        ("hhsh", "3:4", True, "", "n1 n2 n4"),
        ("hhsh", None, True, "", ""),
        ("iiii", None, True, "", "n1 n2 n3 n4"),
        ("hih", "2:3", False, "", "n1 n2 n3"),
        # One more than wanted is a spare.
        ("hfhhh", "4", False, "", "n1 n3 n4 n5"),
        ("shhhh", "4", False, "", "n2 n3 n4 n5"),
        ("hhhhi", "4", False, "", "n1 n2 n3 n4"),
        # A node that is not heard of is waited for only where it is needed.
        ("hhi", "2:3", False, "n3", "n1 n2"),
        ("hhi", None, False, "n3", "n1 n2 n3"),
        ("hfi", "2:3", False, "n3", "n1 n3"),
        ("hhf", "2:3", False, "n3", "n1 n2"),
    ],
)
def test_training_starts_with_the_nodes_that_can_be_used_if_they_are_enough(
    levels: str, nnodes: str | None, exclude_slow: bool, absent: str, expected: str
) -> None:
    within = bounds(nnodes, len(levels), alone=False)
    choice = choose(within, verdict(levels), absent=absent.split(), exclude_slow=exclude_slow)
    assert " ".join(choice.nodes) == expected


def test_a_stop_names_the_node_and_what_to_do() -> None:
    within = bounds("4", 4, alone=False)
    choice = choose(within, verdict("hhfh"), absent=(), exclude_slow=False)
    assert "n3 is faulty: because" in choice.reason
    assert "--exclude=n3" in choice.reason
    assert "--nnodes=3:4" in choice.reason


def test_who_trains_alone_does_so_on_every_node_that_can_be_used() -> None:
    within = bounds("1", 3, alone=True)
    choice = choose(within, verdict("hfh"), absent=(), exclude_slow=False)
    assert choice.nodes == ("n1", "n3")


def test_more_nodes_than_there_are_cannot_be_had() -> None:
    with pytest.raises(UsageError, match="only 4 nodes"):
        bounds("5", 4, alone=False)


def test_few_nodes_join_a_training_that_was_told_where_it_meets() -> None:
    assert bounds("2:4", 1, joins=True) == Bounds(least=1, most=1, joins=True)
    with pytest.raises(UsageError, match="--rdzv-endpoint and --rdzv-id"):
        bounds("2:4", 1)
    with pytest.raises(UsageError, match="there is only 1 node here"):
        bounds("2", 1, joins=True)


@pytest.mark.parametrize(("level", "joins"), [("h", True), ("s", True), ("i", False), ("f", False)])
def test_an_undecided_node_does_not_join_those_who_train_well_without_it(
    level: str, joins: bool
) -> None:
    within = Bounds(least=1, most=1, joins=True)
    assert bool(choose(within, verdict(level), absent=(), exclude_slow=False).nodes) is joins


def test_nobody_goes_on_without_the_node_on_which_they_meet() -> None:
    within = Bounds(least=2, most=3, host="n1")
    choice = choose(within, verdict("fhh"), absent=(), exclude_slow=False)
    assert choice.nodes == ()
    assert "n1 is faulty, because; the nodes meet on it" in choice.reason
