# SPDX-License-Identifier: Apache-2.0
"""Trainings that stand still: where their ranks are, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.collectives import FlightRecord, Operation
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.samples import Frame, RankSample, Standstill
from slurm_health.training.framework import DataManager

TORCH = "/venv/lib/python3.11/site-packages/torch"
TRAIN = Frame("/home/a/train.py", 70, "main")
IN_COLLECTIVE = (TRAIN, Frame(f"{TORCH}/distributed/distributed_c10d.py", 3000, "all_reduce"))
IN_OTHER = (TRAIN, Frame(f"{TORCH}/distributed/distributed_c10d.py", 4000, "all_gather"))
IN_BACKWARD = (TRAIN, Frame(f"{TORCH}/autograd/graph.py", 800, "_engine_run_backward"))
IN_LOADER = (TRAIN, Frame(f"{TORCH}/utils/data/dataloader.py", 700, "__next__"))
IN_CHECKPOINT = (TRAIN, Frame(f"{TORCH}/serialization.py", 900, "save"))
IN_OWN_CODE = (TRAIN, Frame("/home/a/augment.py", 12, "read"))


def rank(number: int, stack: Iterable[Frame] = IN_COLLECTIVE, **more: object) -> RankSample:
    seen = RankSample(
        rank=number,
        node=f"n{number + 1}",
        pid=100 + number,
        step=12,
        state="S",
        answered=bool(stack),
        stack=tuple(stack),
    )
    return RankSample(**{**{f: getattr(seen, f) for f in seen.__struct_fields__}, **more})


def standstill(*ranks: RankSample, **more: object) -> Standstill:
    told = {
        "stalled_s": 40.0,
        "allowance_s": 25.0,
        "step": 12,
        "nodes": tuple(each.node for each in ranks),
        "ranks": ranks,
    }
    return Standstill(**{**told, **more})  # type: ignore[arg-type]


def found(seen: Standstill, *records: FlightRecord) -> Diagnosed:
    data = DataManager([seen, FlightRecords(records=records)])
    diagnosed = HangDiagnostician().diagnose(data_manager=data).diagnosed
    assert diagnosed is not None
    return diagnosed


def flight(number: int, *operations: tuple[int, str, str]) -> FlightRecord:
    return FlightRecord(
        rank=number,
        operations=tuple(
            Operation(group="0", sequence=sequence, what=what, state=state)
            for sequence, what, state in operations
        ),
    )
