# SPDX-License-Identifier: Apache-2.0
"""Trainings that stand still: where their ranks are, and what is said of them."""

from __future__ import annotations

from slurm_health.records.script_records import Diagnosed
from slurm_health.training.diagnosis.collected import FlightRecords
from slurm_health.training.diagnosis.collectives import FlightRecord
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.samples import RankSample, Standstill
from slurm_health.training.framework import DataManager


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
