# SPDX-License-Identifier: Apache-2.0
"""What was found of nodes before, as the prior of the next check."""

from __future__ import annotations

from slurm_health.preflight.localize import Localizer
from slurm_health.preflight.localize.suspicion import prior_of
from slurm_health.records.records import VerdictReached
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.verdict import Level, NodeVerdict


def verdict(**levels: Level) -> VerdictReached:
    return VerdictReached(
        nodes=[NodeVerdict(node=node, level=level) for node, level in levels.items()]
    )


def failed(*nodes: str, accused: tuple[str, ...] = ()) -> Diagnosed:
    return Diagnosed(
        cause="killed",
        description="a rank was killed",
        attribution="undecided",
        sureness="likely",
        nodes=list(nodes),
        accused=list(accused),
    )


def test_without_a_history_no_node_is_suspected() -> None:
    assert prior_of([]) == {}
    assert prior_of([verdict(n1=Level.HEALTHY)]) == {}


def test_the_more_was_seen_of_a_node_the_more_it_is_suspected() -> None:
    bad = verdict(n1=Level.FAULTY, n2=Level.SLOW, n3=Level.INCONCLUSIVE, n4=Level.HEALTHY)

    prior = prior_of([bad])

    assert list(prior) == ["n1", "n2", "n3"]
    assert 0.5 > prior["n1"] > prior["n2"] > prior["n3"] > 0.02


def test_a_node_on_which_a_rank_failed_is_suspected_until_a_check_finds_it_healthy() -> None:
    assert set(prior_of([verdict(n2=Level.HEALTHY), failed("n2")])) == {"n2"}
    assert prior_of([failed("n2"), verdict(n2=Level.HEALTHY)]) == {}


def test_an_accused_node_is_suspected_more_than_one_where_it_only_showed() -> None:
    prior = prior_of([failed("n2", "n3", accused=("n3",))])

    assert prior["n3"] > prior["n2"]


def test_the_localizer_takes_every_prior_that_there_can_be() -> None:
    levels = dict(zip(("n1", "n2", "n3", "n4"), Level, strict=False))

    Localizer(["n1", "n2", "n3", "n4"], prior=prior_of([verdict(**levels), failed("n4")]))
