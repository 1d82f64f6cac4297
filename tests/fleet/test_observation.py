# SPDX-License-Identifier: Apache-2.0

from collections.abc import Sequence
from fractions import Fraction
from math import comb
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.fleet.observation import Observation, Signal, observe
from slurm_health.fleet.standing import NodeRecord, SpoiledJob, at_least, standings
from slurm_health.records.gpu_load import HARDWARE_THERMAL, Burn
from slurm_health.records.record_codec import KINDS, Entry
from slurm_health.records.records import (
    DevicesWatched,
    Record,
    Sampled,
    VerdictReached,
    WorkersReady,
)
from slurm_health.records.standings import Reliability
from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.journals import run_started
from tests.support.rows import rows

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


@rows
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


# --- standings ------------------------------------------------------------------------------------


DAY_S = 86400.0


def record(
    node: str,
    jobs: int,
    spoiled: int = 0,
    *,
    apart_s: float = 2 * DAY_S,
    uids: tuple[int, ...] = (1000,),
    users: int = 1,
) -> NodeRecord:
    """Return a node that spoiled so many of its jobs, one every two days."""
    return NodeRecord(
        node=node,
        jobs=jobs,
        users=users,
        spoiled=tuple(
            SpoiledJob(
                job=str(number),
                time_s=number * apart_s,
                uid=uids[number % len(uids)],
                signals=("slow",),
            )
            for number in range(spoiled)
        ),
    )


FLEET = [record(f"n{number}", jobs=20) for number in range(10)]


def level_of(found: NodeRecord, fleet: list[NodeRecord] = FLEET) -> Reliability:
    return next(each.level for each in standings([found, *fleet]) if each.node == found.node)


def test_a_node_that_spoils_jobs_on_many_days_is_a_lemon() -> None:
    worst = standings([*FLEET, record("bad", jobs=12, spoiled=4)])[0]

    assert (worst.node, worst.level) == ("bad", Reliability.LEMON)
    assert worst.evidence == ("0", "1", "2", "3")
    assert worst.reason.startswith("again and again over 6 days; by chance in 1 of ")
    assert (worst.elsewhere_spoiled, worst.elsewhere_jobs) == (0, 200)


@pytest.mark.parametrize(
    ("hours", "level"), [(23.9, Reliability.SUSPECT), (24.1, Reliability.LEMON)]
)
def test_faults_within_one_day_are_one_fault_and_no_lemon(hours: float, level: Reliability) -> None:
    apart_s = hours * 3600 / 3
    assert level_of(record("bad", jobs=12, spoiled=4, apart_s=apart_s)) is level


def test_one_users_forged_journals_hide_no_lemon() -> None:
    forged = [
        record(f"n{number}", jobs=59, spoiled=39, uids=(666,), users=2) for number in range(10)
    ]
    bad = record("bad", jobs=20, spoiled=6, uids=(1000, 1001), users=2)

    assert level_of(bad, forged) is Reliability.LEMON


def test_a_node_is_compared_with_the_others_and_not_with_perfection() -> None:
    as_bad = [record(f"n{number}", jobs=20, spoiled=5) for number in range(10)]

    assert level_of(record("bad", jobs=20, spoiled=6), as_bad) is Reliability.SUSPECT


@given(st.integers(1, 40), st.integers(0, 40), st.fractions("1/1000", "999/1000"))
def test_the_probability_is_that_of_the_binomial_distribution(
    trials: int, successes: int, rate: Fraction
) -> None:
    exact = sum(
        comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(successes, trials + 1)
    )

    assert at_least(successes, trials, float(rate)) == pytest.approx(float(exact), rel=1e-9)
