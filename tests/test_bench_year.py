# SPDX-License-Identifier: Apache-2.0
"""The replay of a year: its trace, its rooms, and a whole run of a tiny cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.year import kinds, page, play
from benchmarks.year.__main__ import main
from benchmarks.year.checks import FAILS, Checks, Outcome, by_dlrover, localized
from benchmarks.year.clock import Clock
from benchmarks.year.jobs import slots
from benchmarks.year.measures import mean_of
from benchmarks.year.policies import BY_NAME, OURS, PLAIN, Sweep
from benchmarks.year.pool import Pool
from benchmarks.year.recording import Recording, as_recorded, counted, read, resampled
from benchmarks.year.results import Done, Results, Run
from benchmarks.year.rules import binomial_spares
from benchmarks.year.upkeep import probation_every_d
from slurm_health.fleet.standing.standing import JobOnNode, NodeRecord, standings
from slurm_health.records.standings import Level as Standing
from slurm_health.records.verdict import Level, NodeVerdict

MEMORY = ("GPU", "GPU DBE(Double Bit ECC) > Threshold")
FAN = ("Fan", "Speed Critical (Sensor)")


def event(node: str, day: float, kind: str, what: tuple[str, str]) -> dict[str, object]:
    """Return an event as the recording has it."""
    fault = {"Level": "Hardware Failure", "Class": what[0], "Desc": what[1]}
    return {"node_id": node, "event_time": day, "event_type": kind, "fault_type": fault}


def trace(*faults: tuple[str, float, float, tuple[str, str]]) -> bytes:
    """Return a recording of these faults: node, first and last day, what."""
    events = [
        event(node, day, kind, what)
        for node, start, end, what in faults
        for day, kind in ((start, "fault_start"), (end, "fault_end"))
    ]
    return json.dumps(sorted(events, key=lambda each: str(each["event_time"]))).encode()


def recorded(nodes: int = 40) -> Recording:
    """Return a recording of two nodes that fail again and again, and one whose fan does."""
    found = read(
        trace(
            *(("a", day, day + 0.5, MEMORY) for day in range(2, 28, 5)),
            *(("b", day, day + 0.5, ("Stress Test Failure", "")) for day in range(1, 28, 6)),
            ("c", 4.0, 5.0, FAN),
        ),
        nodes=nodes,
    )
    return replace(found, days=30.0)


def test_a_recording_is_read_as_stays_and_repairs() -> None:
    (first, second), *others = as_recorded(
        read(trace(("a", 2.0, 3.0, MEMORY), ("a", 10.0, 10.5, MEMORY)), nodes=3)
    )
    assert (first.well_s, first.repair_s, first.relapse) == (2 * 86400, 86400, False)
    assert (second.well_s, second.relapse, second.again) == (7 * 86400, True, True)
    assert others == [(), ()]


def test_a_fault_with_another_cause_is_a_relapse_and_not_the_same_again() -> None:
    _, second = as_recorded(read(trace(("a", 2.0, 3.0, MEMORY), ("a", 4.0, 5.0, FAN)), nodes=1))[0]
    assert (second.relapse, second.again) == (True, False)


def test_a_fault_that_begins_during_a_repair_is_left_out() -> None:
    (history,) = as_recorded(read(trace(("a", 2.0, 9.0, MEMORY), ("a", 4.0, 5.0, FAN)), nodes=1))
    assert [stay.what for stay in history] == [MEMORY]


@pytest.mark.parametrize("data", [b"", b"{}", b'[{"node_id": 1}]'])
def test_what_is_no_recording_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no fault trace"):
        read(data)


def test_relapses_are_counted_of_repairs_that_were_watched_for_28_days() -> None:
    found = counted(
        read(trace(("a", 1.0, 2.0, FAN), ("a", 9.0, 9.5, FAN), ("b", 60.0, 61.0, FAN)), nodes=2)
    )
    assert (found.faults, found.repairs, found.relapses) == (3, 2, 1)


def test_a_resampled_cluster_keeps_the_rate_and_the_order_of_faults() -> None:
    recording = recorded()
    many = resampled(recording, 4000, random.Random(1))
    rate = sum(map(len, many)) / 4000
    assert rate == pytest.approx(counted(recording).faults / 40, rel=0.1)
    assert many == resampled(recording, 4000, random.Random(1))


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (MEMORY, "memory"),
        (("NIC", "NIC Link Speed low"), "narrow"),
        (("NIC", "NIC Lost"), "gone"),
        (("Fan", "anything"), "board"),
        (("of another trace", ""), "unknown"),
    ],
)
def test_each_fault_has_a_kind(what: tuple[str, str], kind: str) -> None:
    assert kinds.kind_of(what) == kind


def test_the_table_of_what_tests_see_has_a_reason_for_each_kind_and_can_be_halved() -> None:
    assert all(kind.why for kind in kinds.KINDS.values())
    assert all(kind.check <= kind.stress for kind in kinds.KINDS.values())
    assert kinds.halved(kinds.KINDS)["memory"].check == 0.5


def test_events_come_in_the_order_of_time() -> None:
    clock, seen = Clock(), list[str]()
    clock.after(2.0, lambda: seen.append("second"))
    clock.after(1.0, lambda: seen.append("first"))
    clock.after(9.0, lambda: seen.append("never"))
    clock.run(5.0)
    assert (seen, clock.now_s) == (["first", "second"], 5.0)


def test_the_first_free_nodes_are_given_and_those_in_probation_last() -> None:
    pool = Pool(6)
    assert pool.take(2, avoided={0}, last={1}) == [2, 3]
    assert pool.take(5, avoided=()) is None
    assert pool.take(3, avoided={0}, last={1}) == [4, 5, 1]
    pool.give(3)
    assert pool.take(2, avoided=()) == [0, 3]


def test_jobs_fill_most_of_the_cluster() -> None:
    for nodes in (400, 1000, 16384):
        assert 0.9 * nodes <= sum(size for _, size in slots(nodes)) <= nodes


@pytest.mark.parametrize("bad", [[], [FAILS], [1.5]])
def test_a_remembered_check_is_the_real_one(bad: list[float]) -> None:
    checks = Checks(localized)
    rng = random.Random(3)
    found = {checks.of(17, bad, rng) for _ in range(6)}
    assert found <= {localized(17, bad, variant) for variant in range(3)}


def test_the_check_names_a_slow_node_that_dlrovers_rule_does_not() -> None:
    ours, theirs = localized(16, [1.5], 0), by_dlrover(16, [1.5], 0)
    assert [said is not None for said in ours.bad] == [True]
    assert [said is not None for said in theirs.bad] == [False]


def test_no_node_is_a_lemon_by_fewer_spoiled_jobs_than_the_replay_waits_for() -> None:
    spoiled = tuple(
        JobOnNode(job=str(day), time_s=day * 86400.0, uid=day, signals=("faulty",))
        for day in range(2)
    )
    others = [NodeRecord(node=str(number), jobs=100, users=2) for number in range(400)]
    worst = NodeRecord(node="worst", jobs=2, users=2, spoiled=spoiled)
    assert standings([*others, worst])[0].level is Standing.SUSPECT


def test_spares_for_the_99_percent_point_grow_with_the_job() -> None:
    assert binomial_spares(4) == 1
    assert 4 <= binomial_spares(300) <= 5


def test_tests_in_probation_become_rarer() -> None:
    sweep = Sweep(every_d=7.0, probation_d=1.0)
    days = [probation_every_d(sweep, left, 28.0) for left in (28.0, 14.0, 0.0)]
    assert days == pytest.approx([1.0, 7**0.5, 7.0])


def perfect(_nodes: int, bad: Sequence[float], _seed: int) -> Outcome:
    """Return what a check says that is always right."""
    named = NodeVerdict(node="n0", level=Level.FAULTY, reason="it failed", evidence=("it",))
    return Outcome(bad=tuple(named for _ in bad), innocent=(), rounds=2)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_small_year_of_each_policy_adds_up(name: str) -> None:
    found = play.year(recorded(), BY_NAME[name], Checks(perfect), nodes=40, seed=1)
    assert 0 < found["goodput"] <= found["ratio"] <= 100
    assert found["faults"] > 0


def test_a_seed_decides_everything() -> None:
    first, second = (
        play.year(recorded(), OURS, Checks(perfect), nodes=40, seed=2) for _ in range(2)
    )
    assert first == second


def test_a_cluster_without_faults_loses_only_the_time_to_load() -> None:
    nothing = Recording(nodes=40, days=30.0, faults={})
    found = play.year(nothing, PLAIN, play.checks_of(PLAIN), nodes=40, seed=1)
    assert (found["strikes"], found["persons"], found["withheld"]) == (0, 0, 0)
    assert found["ratio"] > 98


def test_a_node_that_its_own_test_sees_does_not_strike_a_job_again() -> None:
    seen = read(trace(("a", 2.0, 4.0, MEMORY)), nodes=1)
    one = Recording(nodes=40, days=30.0, faults=seen.faults)
    plain = play.year(one, PLAIN, play.checks_of(PLAIN), nodes=40, seed=1)
    ours = play.year(one, OURS, Checks(perfect), nodes=40, seed=1)
    assert plain["strikes"] > ours["strikes"] == 1
    assert (ours["drains"], ours["false_drains"]) == (1, 0)


def test_the_interval_of_a_mean_is_students() -> None:
    found = mean_of([1.0, 3.0])
    assert found.value == 2.0
    assert found.half == pytest.approx(12.71)
    assert mean_of([1.0]).half is None


def test_runs_that_are_done_are_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "fault_trace.json").write_bytes(
        trace(("a", 1.0, 2.0, MEMORY), ("b", 9.0, 9.5, MEMORY))
    )
    options = [
        str(tmp_path), f"--results={tmp_path / 'runs'}", "--nodes=40", "--days=10",
        "--policy=plain", "--policy=lemon-cut", f"--figures={tmp_path / 'pictures'}",
    ]  # fmt: skip
    assert main(options) == 0
    first = capsys.readouterr()
    lines = (tmp_path / "runs" / "year.jsonl").read_text().splitlines()
    (tmp_path / "runs" / "year.jsonl").write_text(lines[0] + "\n" + lines[1][:20])
    assert main(options) == 0
    second = capsys.readouterr()
    assert (first.err.count(" s\n"), second.err.count(" s\n")) == (2, 1)
    assert "| plain" in first.out
    # The last line has the machine's load, which changes.
    assert first.out.splitlines()[:-1] == second.out.splitlines()[:-1]
    assert (tmp_path / "pictures" / "year-ratio.svg").read_text().startswith("<svg")


def test_without_a_recording_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no fault_trace.json below" in capsys.readouterr().err
    (tmp_path / "fault_trace.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "it is no fault trace" in capsys.readouterr().err


def test_goals_are_told_against_plain_by_seed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for policy, ratio in (("plain", 90.0), ("best", 96.0)):
        figures = {"ratio": ratio, "relapses_by_test": 61.0, "withheld": 0.5}
        results.add(Done(run=Run(policy=policy, nodes=40, seed=0), figures=figures, took_s=1.0))
    (line,) = page.goals(
        lambda policy, nodes, halved: Results(tmp_path).of(policy, nodes, halved=halved),
        ["best"], [40], halved=False,
    )  # fmt: skip
    assert line.startswith("best, 40 nodes: +6.0 points against plain; 61 % of relapses")
