# SPDX-License-Identifier: Apache-2.0
"""Recordings as trouble leaves them: of other jobs and versions, huge, mixed up, of two faults."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collectives import CollectiveState, FlightRecord
from slurm_health.training.framework import NothingCollected
from slurm_health.training.monitor.collector import EndedJob
from slurm_health.training.monitor.flight_dumps import FlightDumps
from tests.support.ended_jobs import diagnosed_by_output, job

NODES = ("n1", "n2")
BEGAN_S = 1_000_000.0
GROUP = {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}


def entered(last: int, **changes: Any) -> dict[str, Any]:
    """Return what a rank of three recorded that is inside the last collective that it called."""
    entries = [
        {
            "record_id": number - 1,
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[3]],
            "state": "scheduled" if number == last else "completed",
            "retired": number < last,
            "is_p2p": False,
        }
        for number in range(1, last + 1)
    ]
    return {"version": "2.10", "entries": entries, "pg_config": {"0": GROUP}, **changes}


def stopped(last: int, **changes: Any) -> dict[str, Any]:
    """Return what a rank recorded that left its last collective and called no other."""
    dump = entered(last + 1, **changes)
    return {**dump, "entries": dump["entries"][:-1]}


def laid(directory: Path, rank: int, dump: object, *, age_s: float = 0.0) -> None:
    """Lay a dump of a rank that was written in the job, or so much before it began."""
    file = directory / f"flight_{rank}"
    file.write_bytes(pickle.dumps(dump))
    written_s = BEGAN_S - age_s if age_s else BEGAN_S + 60
    os.utime(file, (written_s, written_s))


def ended(directory: Path) -> EndedJob:
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(directory / "flight_")}
    return job(directory, environ=environ, ended_s=BEGAN_S + 100, duration_s=100.0)


def collected(directory: Path) -> tuple[FlightRecord, ...]:
    return FlightDumps(ended(directory)).collect_data().records


def told(text: str) -> Diagnosed:
    found = diagnosed_by_output(text, 1, NODES)
    assert found.accused == []
    return found


def traceback(rank: int, error: str) -> list[str]:
    """Return what a rank prints that ends by an error, behind torchrun's prefix."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/alice/train.py", line 7, in <module>',
        "    main()",
        error,
    ]
    return [f"[rank{rank}]: {line}" for line in lines]


def test_dumps_of_an_earlier_job_in_the_same_place_name_nobody(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        laid(tmp_path, rank, entered(5 if rank == 1 else 6), age_s=3600)

    with pytest.raises(NothingCollected, match="there is no dump"):
        FlightDumps(ended(tmp_path)).collect_data()


def test_a_dump_of_ranks_that_were_numbered_anew_is_read_under_the_number_that_they_have_now(
    tmp_path: Path,
) -> None:
    # Three ranks before the restart, two after it: the third's dump lies there still.
    two = {**GROUP, "ranks": "[0, 1]"}
    laid(tmp_path, 0, entered(6, pg_config={"0": two}))
    laid(tmp_path, 1, stopped(5, pg_config={"0": two}))
    laid(tmp_path, 2, stopped(3), age_s=30)

    found = CollectiveState(collected(tmp_path)).difference

    assert found is not None
    assert found.ranks == (1,)


@pytest.mark.parametrize(
    "dump",
    [
        {"version": "9.0", "entries": [{"process_group": "0", "sequence": 4}]},
        {"version": "9.0", "collectives": {"0": []}},
        {"version": "9.0", "entries": None},
    ],
)
def test_a_dump_of_another_version_is_one_of_which_nothing_is_known(
    tmp_path: Path, dump: object
) -> None:
    laid(tmp_path, 0, entered(6))
    laid(tmp_path, 1, dump)
    laid(tmp_path, 2, entered(6))

    records = collected(tmp_path)

    assert [each.whole for each in records] == [True, False, True]
    assert CollectiveState(records).difference is None


@pytest.mark.heavy
def test_a_cause_before_a_million_lines_is_found() -> None:
    own = traceback(1, "ModuleNotFoundError: No module named 'einops'")
    lines = [*own, *("step 4711 loss 2.25" for _ in range(1_000_000)), "Terminated"]

    assert told("\n".join(lines)).cause == "module-not-found"
