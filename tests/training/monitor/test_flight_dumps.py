# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


RECORDS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for _ in range(3):
    dist.all_reduce(torch.ones(5))
open(sys.argv[1] + "/flight_0", "wb").write(torch._C._distributed_c10d._dump_fr_trace())
"""


@pytest.mark.torch
def test_a_dump_that_torch_itself_made_is_read(tmp_path: Path) -> None:
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    subprocess.run([sys.executable, "-c", RECORDS, str(tmp_path)], env=environ, check=True)
    told = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    (record,) = FlightDumps().collect_data(job(tmp_path, environ=told)).records

    last = record.operations[-1]
    assert (last.group, last.what, last.sizes) == ("0 (gloo)", "all_reduce", "[[5]]")
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
