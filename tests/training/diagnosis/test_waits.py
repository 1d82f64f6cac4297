# SPDX-License-Identifier: Apache-2.0
"""Ranks that are not at the same step are told from those that call another collective."""

from __future__ import annotations

from slurm_health.training.diagnosis.collectives import FlightRecord, Operation
from slurm_health.training.diagnosis.samples import Frame, RankSample
from tests.support.standstills import (
    IN_BACKWARD,
    IN_OTHER,
    found,
    rank,
    standstill,
)

STEP, EPOCH, STRANGE = ("all_reduce", "[[590592]]"), ("all_gather", "[[1]]"), ("all_gather", "[3]")


def flight(number: int, *called: tuple[str, str]) -> FlightRecord:
    last = len(called) - 1
    return FlightRecord(
        rank=number,
        operations=tuple(
            Operation(
                group="0",
                sequence=n,
                what=what,
                sizes=sizes,
                state="scheduled" if n == last else "completed",
            )
            for n, (what, sizes) in enumerate(called)
        ),
    )


def three(
    odd: tuple[str, str], others: tuple[str, str], *before: tuple[str, str]
) -> list[FlightRecord]:
    return [flight(n, *before, odd if n == 1 else others) for n in range(3)]


def test_a_rank_that_calls_what_every_step_has_while_the_others_are_done_is_a_step_ahead() -> None:
    ranks = (rank(0, IN_OTHER), rank(1, IN_BACKWARD), rank(2, IN_OTHER))
    diagnosed = found(standstill(*ranks), *three(STEP, EPOCH, STEP, STEP, STEP))

    assert (diagnosed.cause, diagnosed.sureness) == ("rank-out-of-step", "likely")
    assert (diagnosed.attribution, diagnosed.accused) == ("user error", [])
    assert (diagnosed.ranks, diagnosed.nodes) == ([1], ["n2"])
    assert diagnosed.description.startswith(
        "rank 1 is not at the step of the others: rank 1 called"
    )
    assert "as many batches" in diagnosed.advice


def test_what_each_epoch_has_is_no_steps_own() -> None:
    """Some libraries record no sizes, so that any two gathers look alike."""
    epoch = (*[STEP, ("broadcast", "[[1]]")] * 10, ("all_gather", ""))
    ranks = (rank(0, IN_BACKWARD), rank(1, IN_OTHER), rank(2, IN_BACKWARD))
    diagnosed = found(standstill(*ranks), *three(("all_gather", ""), STEP, *epoch, *epoch, *epoch))

    assert diagnosed.cause == "mismatched-collective"


def told(number: int, stack: tuple[Frame, ...], batches: int, *, ended: bool = False) -> RankSample:
    return rank(number, stack, batches=batches, data_ended=ended)


def test_a_rank_whose_data_ended_before_that_of_the_others_is_behind() -> None:
    ranks = (
        told(0, IN_BACKWARD, 10),
        told(1, IN_OTHER, 9, ended=True),
        told(2, IN_BACKWARD, 10),
    )
    diagnosed = found(standstill(*ranks), *three(EPOCH, STEP, STEP, STEP))

    assert (diagnosed.cause, diagnosed.sureness) == ("rank-out-of-step", "certain")
    assert diagnosed.description == (
        "rank 1 on n2 is behind ranks 0,2: the data there ended after 9 batches"
    )
    assert diagnosed.evidence[0] == "rank 1 on n2: its data gave 9 batches, and then ended"
