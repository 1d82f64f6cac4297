# SPDX-License-Identifier: Apache-2.0
"""Which nodes training starts with."""

from slurm_health.records.records import VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.torchrun.arguments import Bounds
from slurm_health.torchrun.node_choice import choose
from tests.support.rows import rows

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


@rows
def test_training_starts_with_the_nodes_that_can_be_used_if_they_are_enough(
    levels: str, nnodes: str | None, exclude_slow: bool, absent: str, expected: str
) -> None:
    least, _, most = (nnodes or str(len(levels))).partition(":")
    within = Bounds(least=int(least), most=int(most or least))
    choice = choose(within, verdict(levels), absent=absent.split(), exclude_slow=exclude_slow)
    assert " ".join(choice.nodes) == expected


def test_a_stop_names_the_node_and_what_to_do() -> None:
    within = Bounds(least=4, most=4)
    choice = choose(within, verdict("hhfh"), absent=(), exclude_slow=False)
    assert "n3 is faulty: because" in choice.reason
    assert "--exclude=n3" in choice.reason
    assert "--nnodes=3:4" in choice.reason
