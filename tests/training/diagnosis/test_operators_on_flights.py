# SPDX-License-Identifier: Apache-2.0
"""What the records of the Flight Recorder decide, beside what ranks wrote."""

from __future__ import annotations

from slurm_health.training.diagnosis.collected import (
    FlightRecord,
    FlightRecords,
    Operation,
)
from slurm_health.training.diagnosis.training_log import TrainingLog, read_log
from tests.training.diagnosis.test_operators import DATA, TIMED_OUT, diagnose, failed


def recorded(rank: int, *whats: str) -> FlightRecord:
    """Return collectives of which all but the second are over."""
    return FlightRecord(
        rank=rank,
        operations=tuple(
            Operation(
                group="0",
                sequence=number,
                what=what,
                state="scheduled" if number == 1 else "completed",
            )
            for number, what in enumerate(whats)
        ),
    )


def test_the_flight_recorder_turns_a_guess_into_certainty() -> None:
    log = read_log([("out", (DATA / "mismatch.txt").read_text())])
    records = FlightRecords(
        records=(
            recorded(0, "broadcast", "allreduce"),
            recorded(1, "broadcast", "all_gather"),
            recorded(2, "broadcast", "allreduce"),
        )
    )
    found = diagnose(log, records)

    assert (found.cause, found.sureness, found.ranks) == ("mismatched-collective", "certain", [1])


def test_the_flight_recorder_names_the_rank_that_never_came() -> None:
    failures = tuple(failed(rank, TIMED_OUT, consequence=True) for rank in (0, 1))
    records = FlightRecords(
        records=(recorded(0, "allreduce", "allreduce"), recorded(2, "allreduce"))
    )
    found = diagnose(TrainingLog(failures=failures), records)

    assert (found.cause, found.ranks) == ("never-entered", [2])
    assert found.accused == []
