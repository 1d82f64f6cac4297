# SPDX-License-Identifier: Apache-2.0

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.collectives import (
    CollectiveState,
    FlightRecord,
    Reached,
    Transfer,
)
from slurm_health.training.framework import NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps, record_of
from tests.support.ended_jobs import job
from tests.support.rows import rows

PIPELINE, WORLD = ("3", "pipeline"), ("0", "default_pg")


def entry(
    what: str,
    state: str,
    number: int,
    *,
    group: tuple[str, str] = PIPELINE,
    p2p: bool = True,
    library: str = "nccl",
) -> dict[str, Any]:
    """Return an entry of a Flight Recorder; each kind is numbered by itself."""
    return {
        "process_group": group,
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "profiling_name": f"{library}:{what}",
        "input_sizes": [[3]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": p2p,
    }


def dump(*whats: str) -> dict[str, Any]:
    of_gloo: dict[str, Any] = {"group": WORLD, "p2p": False, "library": "gloo"}
    entries = [entry(what, "scheduled", n, **of_gloo) for n, what in enumerate(whats)]
    return {"version": "2.10", "entries": entries}


def collected(directory: Path, *, began_s: float | None = None) -> FlightRecords:
    """Return what is collected of the dumps that lie in a directory."""
    times = {} if began_s is None else {"ended_s": began_s + 100, "duration_s": 100.0}
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(directory / "flight_")}
    return FlightDumps(job(directory, environ=environ, **times)).collect_data()


def lay(directory: Path, rank: int, dumped: object) -> Path:
    file = directory / f"flight_{rank}"
    file.write_bytes(pickle.dumps(dumped))
    return file


BEGAN_S = 1_000_000.0


def lay_at(directory: Path, rank: int, over: int, written_s: float, ranks: str, *more: str) -> None:
    """Lay the dump of a rank whose first collectives are over, and which is in `more`."""
    dumped = dump(*["all_reduce"] * over, *more)
    for each in dumped["entries"][:over]:
        each.update(state="completed", retired=True)
    group = {"name": "0", "desc": "default_pg", "ranks": ranks}
    file = lay(directory, rank, {**dumped, "pg_config": {"0": group}})
    os.utime(file, (written_s, written_s))


def test_dumps_of_an_earlier_job_in_the_same_place_name_nobody(tmp_path: Path) -> None:
    for rank in range(3):
        lay_at(tmp_path, rank, 5, BEGAN_S - 3600, "[0, 1, 2]", *["all_reduce"] * (rank != 1))
    with pytest.raises(NothingCollected, match="there is no dump"):
        collected(tmp_path, began_s=BEGAN_S)


def test_a_dump_of_ranks_that_were_numbered_anew_is_read_under_the_number_that_they_have_now(
    tmp_path: Path,
) -> None:
    # Three ranks before the restart, two after it: the third's dump lies there still.
    lay_at(tmp_path, 0, 5, BEGAN_S + 60, "[0, 1]", "all_reduce")
    lay_at(tmp_path, 1, 5, BEGAN_S + 60, "[0, 1]")
    lay_at(tmp_path, 2, 3, BEGAN_S - 30, "[0, 1, 2]")
    difference = CollectiveState(collected(tmp_path, began_s=BEGAN_S).records).difference
    assert difference is not None
    assert difference.ranks == (1,)


@rows
def test_a_dump_of_another_version_is_one_of_which_nothing_is_known(
    tmp_path: Path, other: object
) -> None:
    for rank in (0, 2):
        lay_at(tmp_path, rank, 5, BEGAN_S + 60, "[0, 1, 2]", "all_reduce")
    lay(tmp_path, 1, other)
    records = collected(tmp_path).records
    assert [each.whole for each in records] == [True, False, True]
    assert CollectiveState(records).difference is None


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
    (record,) = collected(tmp_path).records

    assert record.whole is whole


def test_what_began_before_the_script_is_another_trainings(tmp_path: Path) -> None:
    """As a second job of the user leaves it, where torch writes of its own accord."""
    for rank, began_s in enumerate((800.0, 950.0)):
        recorded = dump("all_reduce", "barrier")
        for number, each in enumerate(recorded["entries"]):
            each["time_created_ns"] = int((began_s + number) * 1e9)
        (tmp_path / f"flight_{rank}").write_bytes(pickle.dumps(recorded))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "flight_")}
    script = job(tmp_path, environ=environ, ended_s=1000.0, duration_s=100.0)

    assert [each.rank for each in FlightDumps(script).collect_data().records] == [1]
    (tmp_path / "flight_1").unlink()
    with pytest.raises(NothingCollected, match="is of a training that began before this one"):
        FlightDumps(script).collect_data()


@rows
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
    found = collected(tmp_path)

    difference = CollectiveState(found.records).difference
    if words is None:
        assert difference is None
    else:
        assert difference is not None
        assert (difference.mismatched, difference.ranks) == (True, (1,))
        assert f"rank 1 called all_reduce {words} as" in difference.description


def batch(state: str, number: int, *whats: str, p2p: bool = True) -> list[dict[str, Any]]:
    """Return a batch (batch_isend_irecv): torch updates the state of its last entry alone."""
    last = {**entry("coalesced", state, number), "is_p2p": p2p}
    return [*(entry(each, "scheduled", number) for each in whats), last]


def record(
    rank: int,
    entries: list[dict[str, Any]],
    ranks: list[int],
    *,
    first: int = 0,
    group: tuple[str, str] = PIPELINE,
) -> FlightRecord:
    """Return the record of a rank; the entries before `first` were overwritten."""
    numbered = [{**each, "record_id": first + n} for n, each in enumerate(entries)]
    config = {group[0]: {"desc": group[1], "ranks": str(ranks)}}
    return record_of({"entries": numbered, "pg_config": config}, rank, lambda found: found)


@pytest.mark.parametrize("p2p", [True, False])
def test_a_stage_that_stopped_between_two_batches_of_transfers_is_named(p2p: bool) -> None:
    """Not all versions of torch say of the entry that ends a batch that it is of transfers."""
    over = {
        0: ["send 0->1", "recv 0<-1"],
        1: ["recv 1<-0", "send 1->2", "recv 1<-2", "send 1->0"],
        2: ["recv 2<-1", "send 2->1"],
    }
    entries = {
        rank: [
            each for n, what in enumerate(whats) for each in batch("completed", n, what, p2p=p2p)
        ]
        for rank, whats in over.items()
    }
    entries[0] += batch("started", 9, "send 0->1", "recv 0<-1", p2p=p2p)
    entries[2] += batch("started", 9, "recv 2<-1", p2p=p2p)
    records = [record(rank, of_rank, [0, 1, 2]) for rank, of_rank in entries.items()]

    assert records[1].transfers == ()
    difference = CollectiveState(records).difference
    assert difference is not None
    assert difference.ranks == (1,)
    assert difference.description == (
        "rank 1 never began its side of a transfer that rank 0 waits for"
    )


def test_a_batch_whose_end_is_not_recorded_neither_waits_nor_shows_who_stayed_away() -> None:
    begun = batch("scheduled", 5, "send 1->0", "recv 1<-0")[:-1]
    captured = record(1, begun, [0, 1])
    waits = record(0, [entry("recv 0<-1", "started", 7)], [0, 1])

    assert captured.transfers == (
        Transfer(peer=0, sends=False, certain=False),
        Transfer(peer=0, sends=True, certain=False),
    )
    assert CollectiveState([captured, waits]).culprits == ()


def test_the_collectives_of_a_batch_are_over_with_it() -> None:
    """As of broadcasts of one coalescing manager, which newer versions of torch record too."""
    whats = (("broadcast", "scheduled"), ("broadcast", "scheduled"), ("coalesced", "completed"))
    of_batch = [entry(what, state, 4, p2p=False) for what, state in whats]
    later = [entry("all_reduce", "completed", number, p2p=False) for number in (5, 6)]

    assert [record(rank, of_batch + later, [0, 1]).reached for rank in (0, 1)] == (
        [{"3 pipeline (nccl)": Reached(entered=6, over=6)}] * 2
    )


@pytest.mark.parametrize(("kept", "named"), [(False, []), (True, [1])])
def test_a_peer_whose_buffer_goes_back_to_no_transfer_is_not_said_to_have_begun_none(
    kept: bool, named: list[int]
) -> None:
    before = entry("send 1->0", "completed", 30)
    later = [entry("all_reduce", "completed", 800 + n, p2p=False) for n in range(3)]
    records = [
        record(0, [entry("recv 0<-1", "started", 31)], [0, 1]),
        record(1, [*([before] if kept else []), *later], [0, 1], first=2000),
    ]

    assert not records[1].whole
    assert [each.rank for each in CollectiveState(records).culprits] == named


def test_what_a_group_did_before_its_numbers_began_anew_is_left_out() -> None:
    """A process that destroys its groups and makes them again has the same names and numbers."""
    records = []
    for rank in range(3):
        before = [entry("all_gather", "completed", n, group=WORLD, p2p=False) for n in range(1, 20)]
        unended = [entry(f"send {rank}->{(rank + 1) % 3}", "started", 1, group=WORLD)]
        now = [entry("all_reduce", "completed", n, group=WORLD, p2p=False) for n in range(1, 6)]
        waits = [entry("all_reduce", "started", 6, group=WORLD, p2p=False)] if rank != 2 else []
        entries = [*before, *unended, *now, *waits]
        records.append(record(rank, entries, [0, 1, 2], group=WORLD))

    difference = CollectiveState(records).difference
    assert difference is not None
    assert difference.description == (
        "rank 2 never entered collective 6 of group 0 (nccl) (all_reduce [[3]]), in which"
        " ranks 0-1 waited"
    )


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
    (record,) = collected(tmp_path).records

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

    with pytest.raises(NothingCollected, match="which no dump does"):
        collected(tmp_path)
    assert not trace.exists()


READS_A_DUMP = """
import resource, sys
from pathlib import Path
from slurm_health.training.framework import NothingCollected
from slurm_health.training.monitor.flight_dumps import FlightDumps, record_of
from tests.support.ended_jobs import job
told = {"TORCH_FR_DUMP_TEMP_FILE": sys.argv[1] + "/flight_"}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    FlightDumps(job(Path(sys.argv[1]), environ=told)).collect_data()
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


def test_dumps_that_are_named_by_host_and_rank_are_found_on_all_hosts(tmp_path: Path) -> None:
    for name in ("trace_node01_0", "trace_node02_5", "trace_node02_x", "other_node02_6"):
        (tmp_path / name).write_bytes(pickle.dumps(dump("all_reduce")))
    environ = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/trace_node01_"}
    script = job(tmp_path, environ=environ, node="node01")

    assert [record.rank for record in FlightDumps(script).collect_data().records] == [0, 5]
