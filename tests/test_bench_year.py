# SPDX-License-Identifier: Apache-2.0
"""The replay of a year: its trace, its rooms, and a whole run of a tiny cluster."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.year import kinds, page, pictures, play
from benchmarks.year.__main__ import main
from benchmarks.year.checks import FAILS, Checks, Outcome, by_dlrover, localized
from benchmarks.year.clock import Clock
from benchmarks.year.jobs import slots
from benchmarks.year.measures import mean_of
from benchmarks.year.policies import BY_NAME, OURS, PLAIN, Sweep
from benchmarks.year.pool import Pool
from benchmarks.year.recording import Recording, as_recorded, counted, read, resampled
from benchmarks.year.results import Done, Doubt, Run
from benchmarks.year.results import read as read_runs
from benchmarks.year.rules import binomial_spares
from benchmarks.year.upkeep import probation_every_d
from slurm_health.fleet.standing.standing import JobOnNode, NodeRecord, standings
from slurm_health.records.standings import Reliability
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
    return json.dumps(sorted(events, key=lambda each: float(str(each["event_time"])))).encode()


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
    assert standings([*others, worst])[0].level is Reliability.SUSPECT


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


def recording_in(directory: Path) -> Path:
    """Put a small recording below a directory."""
    (directory / "deep").mkdir()
    (directory / "deep" / "fault_trace.json").write_bytes(
        trace(("a", 1.0, 2.0, MEMORY), ("b", 9.0, 9.5, MEMORY))
    )
    return directory


def test_runs_that_are_done_are_not_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        str(recording_in(tmp_path)), f"--results={tmp_path / 'runs'}", "--nodes=40", "--days=10",
        "--seeds=1", "--policy=plain", "--policy=lemon-cut",
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


PAGE = Path(__file__).parents[1] / "docs/explanation/year.md"
FIGURES = PAGE.parent / "figures"


def test_the_page_and_its_pictures_are_what_its_runs_make_of_them(tmp_path: Path) -> None:
    text, runs = PAGE.read_text(), (FIGURES / "year-runs.jsonl").read_bytes()
    done = list(read_runs(runs))
    made = page.blocks(done)

    assert {name: each for name, each in page.marked(text).items() if name in made} == made
    assert page.marked(text).keys() == made.keys() | {"recording"}
    assert (FIGURES / "year-ratio.svg").read_text() == pictures.ratio(done)
    assert {each.run for each in done} <= set(page.runs())
    copy = tmp_path / "year.md"
    copy.write_text(page.filled(text, made))
    assert copy.read_text() == text


def test_the_command_writes_between_the_marks_of_a_page_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "year.md").write_text(
        "before\n<!-- year: recording -->\nold\n<!-- end -->\nbetween\n"
        "<!-- year: of another command -->\nkept\n<!-- end -->\nafter\n"
    )
    options = [
        str(recording_in(tmp_path)), f"--results={tmp_path / 'runs'}", "--only-tables",
        f"--page={tmp_path / 'year.md'}",
    ]  # fmt: skip
    assert main(options) == 0

    written = (tmp_path / "year.md").read_text()
    assert written.startswith("before\n<!-- year: recording -->\n2 faults, ")
    assert written.endswith(
        "<!-- end -->\nbetween\n<!-- year: of another command -->\nkept\n<!-- end -->\nafter\n"
    )
    assert (tmp_path / "figures" / "year-faults.svg").read_text().startswith("<svg")


def test_without_a_recording_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no fault_trace.json below" in capsys.readouterr().err
    (tmp_path / "fault_trace.json").write_text("{}")
    assert main([str(tmp_path)]) == 2
    assert "it is no fault trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([96.0, 96.1, 95.9], "yes: +6.0"),
        ([96.0, 99.0, 93.0], "not shown: +6.0"),
        ([91.0, 91.1, 89.9], "no: +0.7"),
        ([99.0], "one seed: +9.0"),
    ],
)
def test_a_goal_holds_only_where_all_of_its_interval_does(
    ratios: Sequence[float], expected: str
) -> None:
    figures = dict.fromkeys(
        ["goodput", "again_mean_min", "strikes", "twice", "swept_h", "spare", "false_drains",
         "lemons"], 0.0
    )  # fmt: skip
    done = [
        Done(
            run=Run(policy=policy, nodes=1000, seed=seed),
            figures={**figures, "ratio": each, "relapses_by_test": 59.0, "withheld": 1.5},
            took_s=1.0,
        )
        for seed, ratio in enumerate(ratios)
        for policy, each in (("plain", 90.0), ("burn-in", ratio))
    ]
    (line,) = [line for line in page.blocks(done)["goals"].splitlines() if "| burn-in " in line]
    assert expected in line
    assert "no: 59" in line
    assert "no: 1.50" in line
    assert ("yes" if min(ratios) >= 90 else "no: -0.1 with one seed") in line.split("|")[-2]


def test_what_persons_do_sooner_helps_whoever_waits_for_them() -> None:
    seen = read(trace(("a", 2.0, 4.0, ("Stress Test Failure", ""))), nodes=1)
    one = Recording(nodes=40, days=30.0, faults=seen.faults)
    late, soon = (
        play.year(one, PLAIN, Checks(perfect), nodes=40, seed=1, doubt=doubt)["strikes"]
        for doubt in (Doubt.NONE, Doubt.QUICK)
    )
    assert soon <= late


def blind(_nodes: int, bad: Sequence[float], _seed: int) -> Outcome:
    """Return what a check says that sees nothing."""
    return Outcome(bad=tuple(None for _ in bad), innocent=(), rounds=2)


def test_a_burn_in_meets_relapses_before_a_job_does() -> None:
    days = [(f"n{number}", first, MEMORY) for number in range(20) for first in (2.0, 6.0)]
    relapsing = read(trace(*((name, day, day + 1, what) for name, day, what in days)), nodes=20)
    cluster = Recording(nodes=40, days=30.0, faults=relapsing.faults)
    without, burned = (
        play.year(cluster, BY_NAME[name], Checks(blind), nodes=40, seed=1)
        for name in ("defaults", "burn-in")
    )
    assert without["relapses_by_test"] < burned["relapses_by_test"]
    assert without["withheld"] < burned["withheld"]


def test_what_a_person_brings_back_is_not_burned_in_by_the_product() -> None:
    loaded = ("Stress Test Failure", "")
    one = Recording(
        nodes=40,
        days=30.0,
        faults=read(trace(("a", 2.0, 4.0, loaded), ("a", 7.0, 8.0, loaded)), nodes=1).faults,
    )
    ours, persons = (
        play.year(one, replace(BY_NAME[name], local=False), Checks(blind), nodes=40, seed=1)
        for name in ("burn-in", "best+persons")
    )
    assert (ours["withheld"], ours["relapses_by_test"]) == (0.0, 0.0)
    assert persons["withheld"] > 0
