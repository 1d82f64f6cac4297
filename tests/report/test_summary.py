# SPDX-License-Identifier: Apache-2.0
"""What a person who was not there reads first."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from slurm_health.records.script_records import (
    Diagnosed,
    EventKind,
    TrainingEvent,
)
from slurm_health.records.verdict import Level, LinkVerdict, NodeVerdict
from slurm_health.report.export import as_json
from slurm_health.report.read import load
from slurm_health.report.summary import Summary, summary_of
from slurm_health.system import journal
from tests.support.journals import (
    RunJournal,
    write_healthy_run,
    write_started_script,
)

STOPPED = Diagnosed(
    cause="rank-stopped",
    description="rank 1 on n2 has been stopped by a signal",
    attribution="undecided",
    sureness="certain",
    nodes=["n2"],
    ranks=[1],
    advice="let it go on: kill -CONT 17 on n2",
)
CANCELLED = Diagnosed(
    cause="cancelled",
    description="the job was cancelled",
    attribution="ended from outside",
    sureness="certain",
)
LOST = Diagnosed(
    cause="node-lost",
    description="Slurm lost n2 while the job ran",
    attribution="node fault",
    sureness="certain",
    nodes=["n2"],
    accused=["n2"],
    advice="start again without n2",
)


def summary(root: Path) -> Summary:
    return summary_of(load(root, "12"))


def test_a_slow_node_that_the_job_kept_can_be_avoided_next_time(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    reason = "matmul 2.00x slower than its peers"
    slow = NodeVerdict(
        node="n3",
        level=Level.SLOW,
        slowdown=2.0,
        probability=0.97,
        component="compute",
        reason=reason,
        evidence=("round 0",),
    )
    run.judge(slow)
    run.finish("proceed", reason=f"n3: {reason}; continuing with n3 anyway")

    told = summary(tmp_path)

    assert told.found == (f"n3 slow (compute, 97 % sure): {reason}",)
    assert told.done == "continuing with n3 anyway"
    assert told.next.startswith("to run without n3: submit again with --exclude=n3")


def test_a_node_that_the_job_asks_for_by_name_is_not_to_be_excluded_beside_that(
    tmp_path: Path,
) -> None:
    run = RunJournal(tmp_path)
    run.start()
    gone = NodeVerdict(
        node="n3",
        level=Level.FAULTY,
        slowdown=1.0,
        probability=0.99,
        component="node",
        reason="gone",
        evidence=("round 0",),
    )
    run.judge(gone, msgspec.structs.replace(gone, node="n4"))
    run.finish(
        "proceed", reason="n3: gone; no requeue: it asks for n[2-3] by name (--nodelist); going on"
    )

    said = "to run without n[3-4]: submit again without n3 in --nodelist and with --exclude=n4"
    assert summary(tmp_path).next.startswith(said)


def test_a_bad_path_accuses_neither_of_its_ends(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    path = LinkVerdict(ends=("n1", "n4"), level=Level.FAULTY, reason="no allgather in 2 rounds")
    run.judge(paths=[path])
    run.finish("proceed")

    told = summary(tmp_path)

    assert told.found[0].startswith("path n1–n4 faulty")  # noqa: RUF001
    assert told.next.startswith("a job on both n1 and n4 may hang: to avoid that, --exclude=n4")
    assert told.next.endswith("tell your administrators about the network between n1 and n4")


def test_a_node_that_was_lost_comes_before_what_the_check_had_found(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    run.write(journal.POST_MORTEM, LOST)

    told = summary(tmp_path)

    assert told.found == (
        "the script failed: Slurm lost n2 while the job ran (node fault, certain)",
        "before the script started, n[1-5]: all healthy",
    )
    assert "start again without n2" in told.next


def test_a_hang_comes_before_the_end_that_a_person_made_of_it(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    hang = TrainingEvent(
        event=EventKind.HANG, stalled_s=37.0, usual_s=30.0, step=35, diagnosed=STOPPED
    )
    run.write(journal.MONITOR, hang)
    hangs = summary(tmp_path)
    run.run_script(signal=15)
    run.write(journal.POST_MORTEM, CANCELLED)
    hung = summary(tmp_path)

    said = "(no step for 37 s after step 35): rank 1 on n2 has been stopped by a signal"
    assert hangs.found[0].startswith(f"the script hangs {said}")
    assert hangs.next == STOPPED.advice
    assert hung.found[0].startswith(f"the script hung {said}")
    assert hung.found[0].endswith("; then the job was cancelled")
    assert "kill -CONT" not in hung.next  # of a process that is no more
    assert hung.next.startswith("should it hang again, look at it while it runs")


def test_a_hang_that_is_over_and_a_slow_rank_are_told(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    run.write(
        journal.MONITOR,
        TrainingEvent(
            event=EventKind.HANG, stalled_s=37.0, usual_s=30.0, step=35, diagnosed=STOPPED
        ),
        TrainingEvent(event=EventKind.HANG_OVER, stalled_s=80.0, step=35),
        TrainingEvent(
            event=EventKind.STRAGGLER,
            nodes=["n4"],
            ranks=[3],
            ratio=1.5,
            took_ms=150.0,
            usual_ms=100.0,
        ),
    )
    run.run_script()

    told = summary(tmp_path)

    assert "hung for a while" in told.found[0]
    assert told.found[0].endswith("it went on after 80 s")
    assert told.found[1].startswith(
        "while the script ran, rank 3 on n4 is slower than the others: 150 ms"
    )
    assert told.next == ""


SLOW_LOADER = Diagnosed(
    cause="slow-data-loader",
    description="rank 3 on n4 is slow because it waits for its data loader",
    attribution="undecided",
    sureness="likely",
    nodes=["n4"],
    ranks=[3],
    advice="look at the filesystem of its data as n4 sees it",
)
SLOW_LINK = Diagnosed(
    cause="slow-network",
    description="the network link of n2 is slow",
    attribution="undecided",
    sureness="likely",
    nodes=["n2"],
    advice="check these nodes' connections",
)


UNEVEN_STAGES = Diagnosed(
    cause="uneven-stages",
    description="stage 3 takes 1.30 times as long as the other roles: it has more to compute",
    attribution="user error",
    sureness="likely",
    advice="give that stage fewer layers",
)


def test_what_was_slow_before_a_failure_is_told_with_what_to_do_about_it(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    run.write(
        journal.MONITOR,
        TrainingEvent(
            event=EventKind.STRAGGLER,
            nodes=["n4"],
            ranks=[3],
            ratio=1.5,
            took_ms=150.0,
            usual_ms=100.0,
            diagnosed=SLOW_LOADER,
        ),
        TrainingEvent(event=EventKind.SLOWDOWN, took_ms=900.0, usual_ms=400.0, diagnosed=SLOW_LINK),
    )
    runs = summary(tmp_path)
    run.run_script(exit_code=1)
    run.write(journal.POST_MORTEM, LOST)
    failed = summary(tmp_path)

    assert (
        runs.next
        == f"slurm-health report --follow 12 follows it; {SLOW_LOADER.advice}; {SLOW_LINK.advice}"
    )
    assert failed.found[0].startswith("the script failed: Slurm lost n2")
    assert failed.found[1] == (
        "while the script ran, rank 3 on n4 is slower than the others: 150 ms of its own per step,"
        " 100 ms usual: rank 3 on n4 is slow because it waits for its data loader"
        " (likely; whose fault is undecided)"
    )
    assert failed.found[2] == (
        "while the script ran, a step takes 900 ms instead of 400 ms: the network link of n2 is"
        " slow (likely; whose fault is undecided)"
    )
    assert failed.next.startswith(f"{LOST.advice}; {SLOW_LOADER.advice}; {SLOW_LINK.advice}")


def test_uneven_stages_are_told_in_text_and_for_programs_and_accuse_no_node(tmp_path: Path) -> None:
    run = write_started_script(tmp_path)
    run.write(
        journal.MONITOR,
        *(
            TrainingEvent(event=EventKind.UNEVEN, ratio=times, diagnosed=UNEVEN_STAGES)
            for times in (1.2, 1.3)
        ),
    )
    told = summary(tmp_path)
    (json_run,) = json.loads(as_json(load(tmp_path, "12")))["runs"]

    assert told.found[0].endswith(f": {UNEVEN_STAGES.description} (user error, likely)")
    assert UNEVEN_STAGES.advice in told.next
    assert [event["ratio"] for event in json_run["events"]] == [1.2, 1.3]
    assert json_run["events"][0]["diagnosed"]["cause"] == "uneven-stages"
    assert json_run["events"][0]["diagnosed"]["accused"] == []


def test_a_script_that_ended_well_with_a_loss_that_is_no_number_is_told_so(tmp_path: Path) -> None:
    lost = Diagnosed(
        cause="not-a-number",
        description="the loss is NaN or infinite at one step after another",
        attribution="user error",
        sureness="likely",
        evidence=["step 7 loss nan"],
        advice="look at the data",
    )
    run = write_started_script(tmp_path)
    run.write(
        journal.MONITOR, TrainingEvent(event=EventKind.LOSS, line="step 8 loss nan", diagnosed=lost)
    )
    run.run_script(exit_code=0)
    told = summary(tmp_path)
    (json_run,) = json.loads(as_json(load(tmp_path, "12")))["runs"]

    assert told.found[0].endswith(f": {lost.description} (user error, likely)")
    assert [event["line"] for event in json_run["events"]] == ["step 8 loss nan"]


def test_a_job_that_ended_for_a_node_says_once_how_to_submit_it(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    reason = "its check process crashed (round 0)"
    run.judge(NodeVerdict(node="n3", level=Level.FAULTY, reason=reason, evidence=("round 0",)))
    again = "submit the job again with --exclude=n3"
    run.finish("stop", exit_code=1, reason=f"n3 cannot be used: n3: {reason}; {again}")

    told = summary(tmp_path)

    assert told.next.startswith(again)
    assert again not in told.done
    assert reason not in told.done


def test_what_a_journal_lacks_is_said_with_what_was_found(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path)
    journal.path_of(run.directory, "n2").unlink()

    assert summary(tmp_path).found[1].startswith("parts of the journal are missing")
