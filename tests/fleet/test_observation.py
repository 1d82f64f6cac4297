# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slurm_health.fleet.observation import Observation, Signal, observe
from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.record_codec import KINDS, Entry
from slurm_health.records.records import (
    DevicesWatched,
    Record,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.verdict import Level, NodeVerdict
from tests.cases import cases
from tests.support.journals import run_started

TYPES = {kind.__struct_config__.tag: kind for kind in KINDS}
UUID = "6b1e0c5a-1111-4222-8333-0123456789ab"


def recorded(rows: list[dict[str, Any]]) -> list[Entry]:
    records = [msgspec.convert(row, TYPES[row["kind"]]) for row in rows]
    times_s = [row.get("at_s", 0.0) for row in rows]
    return [
        Entry(id="", time_s=time_s, kind="", record=record)
        for time_s, record in zip(times_s, records, strict=True)
    ]


def check(
    *,
    nodes: list[str] | None = None,
    levels: dict[str, Level] | None = None,
    master: list[dict[str, Any]] | None = None,
    post_mortem: list[dict[str, Any]] | None = None,
    undecided: bool = False,
    of_nodes: dict[str, Sequence[Record]] | None = None,
) -> dict[str, Observation]:
    """Return what a check says of its nodes: healthy, unless a level is given."""
    names = nodes or ["n1", "n2", "n3", "n4"]
    judged = [
        NodeVerdict(node=name, level=(levels or {}).get(name, Level.HEALTHY), reason="why")
        for name in names
    ]
    begins = Entry(id="", time_s=0.0, kind="", record=run_started(names))
    verdict = Entry(id="", time_s=0.0, kind="", record=VerdictReached(nodes=judged))
    entries = [begins, *recorded(master or []), *([] if undecided else [verdict])]
    after = [entry.record for entry in recorded(post_mortem or []) if entry.record]
    return {found.node: found for found in observe(entries, of_nodes or {}, after)}


@cases("fleet/observation.toml")
def test_what_speaks_against_a_node_is_observed(
    nodes: list[str],
    levels: dict[str, Level],
    master: list[dict[str, Any]],
    post_mortem: list[dict[str, Any]],
    undecided: bool,
    signals: dict[str, list[Signal]],
) -> None:
    found = check(
        nodes=nodes, levels=levels, master=master, post_mortem=post_mortem, undecided=undecided
    )
    assert {name: list(one.signals) for name, one in found.items() if one.signals} == signals
    assert all(one.reason == "why" for name, one in found.items() if name in levels and signals)


def test_names_that_no_node_has_are_left_out() -> None:
    assert set(check(nodes=["n1", "../n2", "\x1b[2J"])) == {"n1"}


def test_what_a_gpu_reported_is_kept_by_its_uuid() -> None:
    hot = Burn(
        index=3,
        uuid=f"GPU-{UUID.upper()}",
        bus="",
        samples=9,
        reasons=HARDWARE_THERMAL,
        reason_samples={HARDWARE_THERMAL: 5},
    )
    well = Burn(index=2, uuid="", bus="", samples=9)
    watched = DevicesWatched(node="n2", round=0, devices=[well, hot])

    found = check(of_nodes={"n2": [watched]})["n2"]

    assert found.signals == (Signal.DEVICE,)
    assert list(found.parts) == [f"GPU-{UUID}"]
    assert "hardware thermal slowdown" in found.parts[f"GPU-{UUID}"]


def test_what_each_device_did_alone_is_kept_by_its_uuid_where_it_is_known() -> None:
    ready = WorkersReady(
        node="n2",
        launch=0,
        store_port=1,
        torch="2.13.0",
        backend="nccl",
        devices=[f"NVIDIA H200 {UUID}", "cpu"],
    )
    sample = Sampled(
        node="n2",
        round=0,
        group=["n2"],
        probe="matmul",
        iteration_ms=[[2.0, 2.0], [4.0, 4.0]],
        flop=8e9,
    )

    found = check(of_nodes={"n2": [ready, sample]})["n2"]

    assert {part: found.figures[part] for part in found.figures if part} == {
        f"GPU-{UUID}": {"matmul GFLOP/s": 4000.0},
        "device 1": {"matmul GFLOP/s": 2000.0},
    }


def test_a_check_that_never_began_says_nothing() -> None:
    assert observe([], {}, []) == []
