# SPDX-License-Identifier: Apache-2.0

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_health.records.record_codec import Entry
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    MasterStopped,
    MasterWaits,
    Record,
    Sampled,
    VerdictReached,
)
from slurm_health.records.verdict import (
    Level,
    LinkVerdict,
    NodeVerdict,
    StorageBlame,
    StorageVerdict,
)
from slurm_health.report.acts import acts_of
from slurm_health.report.build import run_of
from slurm_health.report.read import load, read_run
from slurm_health.report.sentences import figure_key, record_text
from slurm_health.report.story import Node, Run, State, Story
from tests.support.journals import (
    Clock,
    RunJournal,
    sampled,
    write_healthy_run,
)
from tests.support.rows import rows


def report_of(run: RunJournal, *, now_s: float | None = None) -> Run:
    return run_of(read_run(run.directory), now_s=now_s)


def node_of(report: Run | Story, name: str) -> Node:
    return next(node for node in report.nodes if node.node == name)


def values(report: Run | Story, node: str, probe: str) -> list[float]:
    return [round(value, 3) for value in node_of(report, node).figures.get(figure_key(probe), ())]


def run_with_a_round(tmp_path: Path, *samples: Sampled, bad: str = "") -> Run:
    run = RunJournal(tmp_path, nodes=["n1", "n2", "n3"])
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    for sample in samples:
        run.write(sample.node, sample)
    run.end_round(0)
    run.judge(*([NodeVerdict(node=bad, level=Level.SLOW, reason="slow")] if bad else []))
    return report_of(run)


# --- figures -------------------------------------------------------------------------------------


@rows
def test_a_node_is_shown_the_figures_that_are_its_own(
    tmp_path: Path,
    samples: list[tuple[str, str, float]],
    bad: str,
    figures: dict[str, dict[str, list[float]]],
) -> None:
    pair = ["n1", "n2"]
    measured = [sampled(node, 0, pair, probe, time_ms) for node, probe, time_ms in samples]
    report = run_with_a_round(tmp_path, *measured, bad=bad)
    for node, expected in figures.items():
        assert {probe: values(report, node, probe) for probe in expected} == expected


@rows
def test_what_was_not_measured_is_missing(tmp_path: Path, sample: dict[str, Any]) -> None:
    record = Sampled(node="n1", round=0, group=["n1"], **sample)
    huge = msgspec.structs.replace(record, total_bytes=10**400)
    for one in (record, huge):
        assert node_of(run_with_a_round(tmp_path, one), "n1").figures == {}


def test_the_figure_of_a_bad_path_is_held_against_neither_end(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1", "n2"])
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    run.measure(0, ["n1", "n2"], allgather_gb_per_s=0.01)
    run.end_round(0)
    run.master(
        VerdictReached(
            nodes=[NodeVerdict(node=node, level=Level.HEALTHY) for node in run.nodes],
            paths=[LinkVerdict(ends=("n1", "n2"), level=Level.SLOW)],
        )
    )

    assert values(report_of(run), "n1", "allgather") == []


# --- how far a check got -------------------------------------------------------------------------


def test_an_unfinished_check_says_where_it_is(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    waiting = report_of(run)
    run.begin_round(0, [["n1", "n2"]])
    run.end_round(0)
    run.begin_round(1, [["n1", "n2"]])
    measuring = report_of(run)
    run.judge()
    acting = report_of(run)

    assert {waiting.state, measuring.state, acting.state} == {State.RUNNING}
    assert waiting.note == "still running: waiting for the agents"
    assert measuring.note == "still running: round 1"
    assert acting.note == "still acting on the verdict"


@pytest.mark.parametrize(("silent_s", "state"), [(60.0, State.RUNNING), (121.0, State.STOPPED)])
def test_a_master_that_says_nothing_is_gone(tmp_path: Path, silent_s: float, state: State) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    run.master(MasterWaits(reason="2 nodes"), after_s=600.0)

    assert report_of(run, now_s=run.clock.now_s + silent_s).state is state

    run.judge()  # acting takes longer
    assert report_of(run, now_s=run.clock.now_s + 600).state is State.RUNNING
    stopped = report_of(run, now_s=run.clock.now_s + 3000)
    assert stopped.note == "the master stopped while acting on the verdict"


@rows
def test_a_check_that_a_signal_ended_is_stopped_at_once_and_says_by_whom_and_when(
    tmp_path: Path, rounds: int, stopped: MasterStopped, note: str
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    for number in range(rounds):
        run.begin_round(number, [["n1", "n2"]])
    run.master(stopped)

    report = report_of(run, now_s=run.clock.now_s)
    assert (report.state, report.note) == (State.STOPPED, note)


def test_a_check_that_another_followed_is_over(tmp_path: Path) -> None:
    clock = Clock()
    first = RunJournal(tmp_path, label="0", clock=clock)
    first.start()
    first.begin_round(0, [["n1", "n2"]])
    write_healthy_run(tmp_path, label="1", clock=clock)

    assert load(tmp_path, "12").runs[0].state is State.STOPPED


# --- the checks of a job together ----------------------------------------------------------------


@rows
def test_the_latest_verdict_is_shown_unless_it_leaves_open_what_was_found_bad(
    tmp_path: Path, earlier: Level | None, later: Level | None, shown: Level
) -> None:
    for label, level in (("0", earlier), ("1", later)):
        run = RunJournal(tmp_path, label=label)
        run.start()
        if level:
            run.judge(NodeVerdict(node="n1", level=level, reason="because"))

    assert node_of(load(tmp_path, "12"), "n1").level is shown


@pytest.mark.parametrize(("second", "shown"), [(["n1", "n4"], 0), (["n1", "n2"], 1)])
def test_a_bad_path_stands_until_both_its_ends_are_judged_again(
    tmp_path: Path, second: list[str], shown: int
) -> None:
    path = LinkVerdict(ends=("n1", "n4"), level=Level.SLOW, reason="0.1 GB/s")
    verdicts: list[tuple[str, list[str], list[LinkVerdict]]] = [
        ("0", ["n1", "n2", "n4"], [path]),
        ("1", second, []),
    ]
    for label, nodes, paths in verdicts:
        run = RunJournal(tmp_path, label=label, nodes=nodes)
        run.start()
        judged = [NodeVerdict(node=node, level=Level.HEALTHY) for node in nodes]
        verdict: Record = VerdictReached(nodes=judged, paths=paths)
        run.master(verdict)

    assert len(load(tmp_path, "12").paths) == shown


# --- acts ----------------------------------------------------------------------------------------


@rows
def test_intents_and_results_become_acts(
    written: list[tuple[str, str, list[str], str]], acts: list[tuple[str, str, str, str]]
) -> None:
    entries = []
    for what, action, nodes, detail in written:
        record: Record = ActionIntended(action=Action(action), nodes=nodes)
        if what != "intends":
            succeeded = what == "did"
            record = ActionDone(
                action=Action(action), succeeded=succeeded, nodes=nodes, detail=detail
            )
        entries.append(Entry(id="master:1", time_s=0.0, kind="", record=record))

    made = acts_of(entries)

    shown = [(act.action, ",".join(act.nodes), act.progress.value, act.detail) for act in made]
    assert shown == acts


def test_the_timeline_names_storage_that_is_no_nodes_fault() -> None:
    bad = StorageVerdict(path="/data", blame=StorageBlame.SERVER, level=Level.FAULTY, reason="hung")
    well = NodeVerdict(node="n1", level=Level.HEALTHY)

    text = record_text(VerdictReached(nodes=[well], storage=[bad]), "train.sh")

    assert text == "verdict: all nodes healthy, storage /data not well (server)"
