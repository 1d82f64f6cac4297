# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.flight import first_difference
from slurm_health.training.monitor.collector import NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from tests.support.ended_jobs import job


def dump(*whats: str) -> dict[str, Any]:
    return {
        "version": "2.10",
        "entries": [
            {
                "process_group": ("0", "default_pg"),
                "collective_seq_id": number,
                "profiling_name": f"gloo:{what}",
                "input_sizes": [[3]],
                "state": "scheduled",
                "retired": False,
                "is_p2p": False,
            }
            for number, what in enumerate(whats)
        ],
    }


@pytest.mark.parametrize(("first", "whole"), [(0, True), (500, False)])
def test_each_librarys_buffer_is_full_or_not_by_itself(
    tmp_path: Path, first: int, whole: bool
) -> None:
    of_nccl = dump("all_reduce", "barrier")["entries"]
    of_gloo = dump("all_reduce")["entries"]
    entries = [{**each, "record_id": number} for number, each in enumerate(of_gloo)]
    entries += [
        {**each, "record_id": first + number, "profiling_name": "nccl:barrier"}
        for number, each in enumerate(of_nccl)
    ]
    (tmp_path / "flight_0").write_bytes(pickle.dumps({"entries": entries}))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    (record,) = FlightDumps().collect_data(job(tmp_path, environ=environ)).records

    assert record.whole is whole


def test_a_damaged_dump_is_a_record_of_which_nothing_is_known(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps(dump("all_reduce", "barrier")))
    (tmp_path / "flight_1").write_bytes(b"\x80\x04")
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    found = FlightDumps().collect_data(job(tmp_path, environ=environ))

    assert [(record.rank, record.whole) for record in found.records] == [(0, True), (1, False)]


def test_what_began_before_the_script_is_another_trainings(tmp_path: Path) -> None:
    """As a second job of the user leaves it, where torch writes of its own accord."""
    for rank, began_s in enumerate((800.0, 950.0)):
        recorded = dump("all_reduce", "barrier")
        for number, each in enumerate(recorded["entries"]):
            each["time_created_ns"] = int((began_s + number) * 1e9)
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps(recorded))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    script = job(tmp_path, environ=environ, ended_s=1000.0, duration_s=100.0)

    assert [each.rank for each in FlightDumps().collect_data(script).records] == [1]
    (tmp_path / "flight_1").unlink()
    with pytest.raises(NothingCollected, match="is of a training that began before this one"):
        FlightDumps().collect_data(script)


def test_the_dumps_of_ranks_are_read(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps(dump("all_reduce", "barrier")))
    (tmp_path / "flight_x").write_bytes(b"")
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    found = FlightDumps().collect_data(job(tmp_path, environ=environ))

    assert [record.rank for record in found.records] == [0, 1]
    first, second = found.records[0].operations
    assert (first.what, first.sizes, second.what, second.sizes) == (
        "all_reduce",
        "[[3]]",
        "barrier",
        "",
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, None),
        ({"input_dtypes": ["Half"], "output_dtypes": ["Half"]}, "[[3]] Half"),
        ({"output_dtypes": ["Half"]}, "[[3]] Float as Half"),
        ({"output_sizes": [[6]]}, "[[3]] Float to [[6]]"),
    ],
)
def test_ranks_that_reduce_other_numbers_or_into_another_size_called_something_else(
    tmp_path: Path, other: dict[str, Any], words: str | None
) -> None:
    told = {"input_dtypes": ["Float"], "output_dtypes": ["Float"], "output_sizes": [[3]]}
    for rank in range(3):
        entries = [
            {**each, **told, **(other if rank == 1 else {})}
            for each in dump("all_reduce")["entries"]
        ]
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps({"entries": entries}))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    found = FlightDumps().collect_data(job(tmp_path, environ=environ))

    difference = first_difference(found.records)
    if words is None:
        assert difference is None
    else:
        assert difference is not None
        assert (difference.mismatched, difference.ranks) == (True, (1,))
        assert f"rank 1 called all_reduce {words} as" in difference.description


RECORDS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(5))
open(sys.argv[1] + "/flight_0", "wb").write(torch._C._distributed_c10d._dump_fr_trace())
"""


@pytest.mark.heavy
@pytest.mark.torch
def test_a_dump_that_torch_itself_made_is_read(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", RECORDS, str(tmp_path)], env=environ, check=True)
    told = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    (record,) = FlightDumps().collect_data(job(tmp_path, environ=told)).records

    last = record.operations[-1]
    assert (last.group, last.what, last.sizes) == ("0 (gloo)", "all_reduce", "[[5]] Float")
    assert [each.sequence for each in record.operations[-3:]] == [
        last.sequence - 2,
        last.sequence - 1,
        last.sequence,
    ]


class Bomb:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


def test_a_dump_that_would_run_something_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (tmp_path / "flight_0").write_bytes(pickle.dumps({"entries": [Bomb(trace)]}))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}

    with pytest.raises(NothingCollected, match="which no dump does"):
        FlightDumps().collect_data(job(tmp_path, environ=environ))
    assert not trace.exists()


READS_A_DUMP = """
import resource, sys
from pathlib import Path
from slurm_health.training.monitor.collector import NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps
from tests.support.ended_jobs import job
told = {"TORCH_FR_DUMP_TEMP_FILE": sys.argv[1] + "/flight_"}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    FlightDumps().collect_data(job(Path(sys.argv[1]), environ=told))
except NothingCollected as err:
    print("MemoryError" in str(err))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_damaged_dump_takes_no_gigabytes(tmp_path: Path) -> None:
    # None, to be remembered under the number 2^26: the reader makes a list of twice as many.
    (tmp_path / "flight_0").write_bytes(b"\x80\x02Nr" + (1 << 26).to_bytes(4, "little") + b".")
    argv = [sys.executable, "-c", READS_A_DUMP, str(tmp_path)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "True"
    assert int(said[1]) < 256 << 10  # kB


def test_without_dumps_the_flight_recorder_says_how_to_get_them(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}

    assert (
        "--flight-recorder=on" in FlightDumps().is_enabled(job(tmp_path, environ=environ)).why_not
    )
