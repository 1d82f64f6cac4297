# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.records.records import Action, ActionDone, ActionIntended, VerdictReached
from slurm_health.records.text import duration_text
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.report.build import run_report
from slurm_health.report.layout import number_text
from slurm_health.report.read import load, read_run
from slurm_health.report.table import check_summary, headline, job_text, tasks_text
from slurm_health.system import journal
from tests.report.golden import DATA, assert_matches_file
from tests.support.journals import (
    Clock,
    RunJournal,
    sampled,
    write_healthy_run,
    write_requeued_job,
    write_run_with_a_faulty_node,
)


def requeued(root: Path) -> None:
    write_requeued_job(root)


def running(root: Path) -> None:
    clock = Clock()
    write_run_with_a_faulty_node(root, clock=clock)
    run = RunJournal(root, label="1", nodes=["n1", "n2", "n4", "n5", "n6"], clock=clock)
    run.start()
    run.begin_round(0, [["n1", "n2"], ["n4", "n5"]])
    run.measure(0, ["n1", "n2"])


def stopped(root: Path) -> None:
    run = RunJournal(root)
    run.start()
    run.begin_round(0, [["n1", "n2"], ["n3", "n4"]])
    run.run_script(duration_s=3725.0, signal=15)


def nothing_recorded(root: Path) -> None:
    RunJournal(root)


def no_verdict(root: Path) -> None:
    run = RunJournal(root)
    run.start()
    run.finish("proceed", exit_code=3, reason="no agent could be started: srun: Invalid account")
    run.run_script(exit_code=3)


def several_kinds_of_trouble(root: Path) -> None:
    run = RunJournal(root, nodes=[f"gpu{index:02}" for index in range(1, 13)])
    run.start()
    run.begin_round(0, [run.nodes[start : start + 2] for start in range(0, 12, 2)])
    for start in range(0, 12, 2):
        group = run.nodes[start : start + 2]
        run.measure(0, group, allgather_gb_per_s=329.0, matmul_gflop_per_s=738_000.0 + start * 500)
        for node in group:
            run.write(node, sampled(node, 0, group, "gpt", 118.0 + start))
    run.end_round(0)
    slow = "matmul 1.6 times slower than the healthy nodes, alone and in two rounds of pairs"
    judged = {node: NodeVerdict(node=node, level=Level.HEALTHY) for node in run.nodes}
    for node in ("gpu05", "gpu06"):
        judged[node] = NodeVerdict(node=node, level=Level.SLOW, reason=slow, evidence=("round 0",))
    judged["gpu09"] = NodeVerdict(
        node="gpu09", level=Level.INCONCLUSIVE, reason="no partner passed to re-test it with"
    )
    judged["gpu12"] = NodeVerdict(
        node="gpu12", level=Level.FAULTY, reason="no report from its agent", evidence=("round 0",)
    )
    run.master(
        VerdictReached(
            nodes=list(judged.values()),
            paths=[LinkVerdict(ends=("gpu01", "gpu04"), level=Level.SLOW, reason="95 of 329 GB/s")],
            leaves=[LinkVerdict(ends=("leaf2",), level=Level.SLOW, reason="its uplink is shared")],
        )
    )
    run.master(
        ActionIntended(action=Action.DRAIN, nodes=["gpu12"]),
        ActionDone(
            action=Action.DRAIN,
            succeeded=False,
            detail='left alone: drained by an administrator: "bad fan"',
        ),
        ActionIntended(action=Action.HOLD, reason="2 requeues so far, the most allowed"),
        ActionDone(action=Action.HOLD, succeeded=True),
    )
    run.finish("stop", exit_code=1, reason="the job is held")


def two_checks_in_one_attempt(root: Path) -> None:
    clock = Clock()
    write_healthy_run(root, clock=clock, job=13, array="12_3")
    write_healthy_run(root, label="0-2", clock=clock, job=13, array="12_3", nodes=["n1", "n2"])
    (root / "lab" / "12").symlink_to("13")


def went_on_all_the_same(root: Path) -> None:
    run = RunJournal(root, nodes=["n1", "n2", "n3"])
    run.start()
    run.begin_round(0, [["n1", "n2", "n3"]])
    run.end_round(0)
    why = "alone it passes, and no pair could be measured"
    run.judge(
        NodeVerdict(node="n2", level=Level.INCONCLUSIVE, reason=why),
        NodeVerdict(node="n3", level=Level.INCONCLUSIVE, reason=why),
    )
    run.finish("proceed", reason="n[2-3] undecided, going on all the same")


CASES = {
    "requeued": requeued,
    "running": running,
    "stopped": stopped,
    "nothing-recorded": nothing_recorded,
    "no-verdict": no_verdict,
    "trouble": several_kinds_of_trouble,
    "two-checks": two_checks_in_one_attempt,
    "went-on": went_on_all_the_same,
}


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_a_job(tmp_path: Path, name: str) -> None:
    CASES[name](tmp_path)

    text = job_text(load(tmp_path, "12"))

    assert_matches_file(text, DATA / f"{name}.txt", tmp_path)


@pytest.mark.parametrize("name", ["requeued", "trouble"])
def test_the_table_in_a_narrow_terminal(tmp_path: Path, name: str) -> None:
    CASES[name](tmp_path)

    text = job_text(load(tmp_path, "12"), width=60)

    assert max(map(len, text.splitlines())) <= 60
    assert_matches_file(text, DATA / f"{name}-60-columns.txt", tmp_path)


def test_the_reason_wraps_in_its_column_where_there_is_room(tmp_path: Path) -> None:
    several_kinds_of_trouble(tmp_path)

    text = job_text(load(tmp_path, "12"), width=100)

    assert_matches_file(text, DATA / "trouble-100-columns.txt", tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_table_is_plain_ascii_where_the_terminal_is(tmp_path: Path, name: str) -> None:
    CASES[name](tmp_path)
    report = load(tmp_path, "12")

    plain = job_text(report, unicode=False)

    assert plain.isascii()
    assert len(plain.splitlines()) == len(job_text(report).splitlines())


@pytest.mark.parametrize("width", [None, 1, 20, 40, 60, 80, 120])
@pytest.mark.parametrize("name", CASES)
def test_no_line_ends_in_blanks_and_no_reason_is_cut(
    tmp_path: Path, name: str, width: int | None
) -> None:
    CASES[name](tmp_path)
    report = load(tmp_path, "12")

    text = job_text(report, width=width)

    assert all(line == line.rstrip() for line in text.split("\n"))
    for reason in {node.verdict.reason for node in report.nodes if node.verdict}:
        assert set(reason.split()) <= set(text.split())


def test_text_of_programs_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1"])
    run.start(script="/home/ml/\x1b[2Jtrain.sh")
    reason = "srun: error\nline two\r\x1b]0;title\x07"
    run.judge(NodeVerdict(node="n1", level=Level.INCONCLUSIVE, reason=reason))

    text = job_text(load(tmp_path, "12"))

    assert all(line.isprintable() for line in text.split("\n"))
    assert "srun: error line two ]0;title" in text


def test_node_names_that_no_list_can_hold_are_shown(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n[1", "n@2"])
    run.start()

    assert "n[1, n@2" in job_text(load(tmp_path, "12"))


def test_a_requeue_that_was_begun_took_effect_if_there_is_a_later_attempt(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.master(ActionIntended(action=Action.REQUEUE))
    alone = job_text(load(tmp_path, "12"))
    RunJournal(tmp_path, label="1")

    assert "began to requeue the job, result not recorded" in alone
    assert "   requeued" in job_text(load(tmp_path, "12"))


def test_a_check_is_summed_up_at_its_end(tmp_path: Path) -> None:
    run = run_report(read_run(write_run_with_a_faulty_node(tmp_path).directory))

    assert headline(run) == "n[1-5]: 3 rounds, 6.1 s: 1 faulty (n3)"
    assert_matches_file(check_summary(run), DATA / "check.txt", tmp_path)


def test_a_healthy_check_has_no_reason_column(tmp_path: Path) -> None:
    run = run_report(read_run(write_healthy_run(tmp_path).directory))

    assert headline(run) == "n[1-2,4-6]: 2 rounds, 4.8 s: all healthy"
    assert "REASON" not in check_summary(run)


def test_what_was_not_measured_comes_first(tmp_path: Path) -> None:
    unseen = "GPUs not measured (no torch): light probes"
    run = RunJournal(tmp_path)
    run.start()
    run.master(VerdictReached(nodes=[], unseen=unseen))

    assert check_summary(run_report(read_run(run.directory))).startswith(unseen)
    assert job_text(load(tmp_path, str(run.job))).startswith(unseen)


def test_a_check_that_has_not_started_has_a_headline(tmp_path: Path) -> None:
    run = run_report(read_run(RunJournal(tmp_path).directory))

    assert headline(run) == check_summary(run) == "no start of a check is recorded"


def test_a_script_that_a_program_hid_goes_by_the_name_of_its_job(tmp_path: Path) -> None:
    """As submitit does: its scripts are called .submission_file_0123.sh."""
    run = RunJournal(tmp_path)
    run.start(script="/home/ml/logs/.submission_file_0123.sh", job_name="sweep")
    run.judge(NodeVerdict(node="n1", level=Level.FAULTY, reason="no answer", evidence=("round 0",)))
    run.run_script()

    text = job_text(load(tmp_path, "12"))

    assert text.startswith("Job 12   sweep   ")
    assert "sweep ran 41 s" in text
    assert "sweep started" in text
    assert "submission" not in text


def test_a_script_without_a_recorded_end_is_not_said_to_run(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path)
    supervisor = journal.path_of(run.directory, journal.SUPERVISOR)
    supervisor.write_bytes(supervisor.read_bytes().splitlines(keepends=True)[0])

    assert "train.sh started, end not recorded yet" in job_text(load(tmp_path, "12"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.3849, "0.38"),
        (0.0996, "0.10"),
        (6.14, "6.1"),
        (9.96, "10"),
        (48.4, "48"),
        (329.7, "330"),
        (741_234.0, "741234"),
        (1.0e-9, "1.0e-09"),
        (1.0e300, "1.0e+300"),
    ],
)
def test_figures_have_two_significant_digits(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.04, "0.0 s"),
        (6.1, "6.1 s"),
        (9.96, "10 s"),
        (41.2, "41 s"),
        (125.0, "2 min 5 s"),
        (7800.0, "2 h 10 min"),
        (260_000.0, "3 d 0 h"),
        (-1.0, "an unknown time"),
    ],
)
def test_durations_read_as_a_person_says_them(duration_s: float, text: str) -> None:
    assert duration_text(duration_s) == text


def test_healthy_nodes_that_a_job_waits_for_are_told_below_the_table(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=[f"n{number}" for number in range(1, 8)])
    run.start()
    run.judge(
        *(
            NodeVerdict(
                node=f"n{number}",
                level=Level.HEALTHY,
                slowdown=1 + number / 100,
                reason=f"matmul:device 3 is {number} % slower than its peers",
            )
            for number in range(3, 8)
        )
    )

    lines = check_summary(run_report(read_run(run.directory))).splitlines()

    assert lines[-4:] == [
        "healthy n7: matmul:device 3 is 7 % slower than its peers",
        "healthy n6: matmul:device 3 is 6 % slower than its peers",
        "healthy n5: matmul:device 3 is 5 % slower than its peers",
        "healthy n[3-4]: slower than most, but less so than these",
    ]


def test_the_tasks_of_an_array_have_a_line_each(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13, array="12_1")
    write_run_with_a_faulty_node(tmp_path, job=14)
    others = {"12_[3-4]": "it is pending"}
    tasks = tasks_text([load(tmp_path, "13"), load(tmp_path, "14")], others=others)
    first, second, third, *_, last = tasks.splitlines()
    assert third.split() == ["12_[3-4]", "it", "is", "pending"]
    assert first.startswith("12_1")
    assert "all healthy" in first
    assert second.startswith("14")
    assert "1 faulty (n3)" in second
    assert last == "slurm-health report 12_1 shows one task in full."


def test_a_task_says_which_bad_nodes_it_has_left(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)

    (line, *_) = tasks_text([load(tmp_path, "12")]).splitlines()

    assert "all healthy   without n3 (faulty)   train.sh ran 41 s" in line


def test_a_held_job_reads_as_held_although_nobody_lived_to_say_so(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.judge(NodeVerdict(node="n3", level=Level.SLOW, reason="matmul 2.1 times slower"))
    run.master(ActionIntended(action=Action.HOLD, nodes=["n3"], reason="n3: one partner"))
    run.finish("hold", exit_code=3)

    assert "held the job (n3: one partner)" in job_text(load(tmp_path, "12"))
