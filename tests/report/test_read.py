# SPDX-License-Identifier: Apache-2.0
"""What is read of a run, also where files lack, are damaged or newer; ids that were given again."""

import shutil
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slurm_health.records.errors import JournalError, RecordTooNew
from slurm_health.records.records import AgentsLaunched, NodeReported
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report import read
from slurm_health.report.export import as_json, job_document
from slurm_health.report.layout import Page
from slurm_health.report.read import load, read_run
from slurm_health.report.story import Story
from slurm_health.report.text import check_text, headline, job_text
from slurm_health.system import journal
from tests.support.journals import (
    STARTED_S,
    Clock,
    RunJournal,
    run_started,
    write_healthy_run,
    write_requeued_job,
)
from tests.support.rows import rows
from tests.support.stranger import given_to

SUBMITTED_S = int(STARTED_S) - 42
BEGUN_S = int(STARTED_S) - 2


def begun(
    root: Path, label: str, *, after_s: float = 0.0, submitted: bool = True, queued_s: int = 40
) -> RunJournal:
    """Write a run that began so long after the usual time, two seconds after its start by Slurm."""
    run = RunJournal(root, label=label, clock=Clock(STARTED_S + after_s))
    start = BEGUN_S + int(after_s)
    run.start(start_time_s=start, submit_time_s=start - queued_s if submitted else None)
    return run


@pytest.mark.parametrize("submitted", [True, False])
@rows
def test_a_job_with_an_id_that_was_given_again_stands_by_itself(
    tmp_path: Path,
    *,
    begins: dict[str, float],
    runs: list[str],
    submitted: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for label, after_s in begins.items():
        begun(tmp_path, label, after_s=after_s, submitted=submitted and len(begins) == 2)

    assert [run.run for run in load(tmp_path, "12").runs] == runs
    older = "an earlier job had the id 12 too, on 2023-11-14 22:13" in caplog.text
    assert older is (runs == ["0-2"])


def test_an_array_task_with_an_id_that_was_given_again_is_the_new_one(tmp_path: Path) -> None:
    for job in (13, 15):
        run = RunJournal(tmp_path, job=job)
        run.start(array="12_3")
        (started,) = (
            entry.record
            for entry in journal.read_all(run.directory, journal.MASTER)
            if entry.kind == "run_started"
        )
        journal.link_array_task(tmp_path, started)  # type: ignore[arg-type]

    assert load(tmp_path, "12_3").runs[0].started.job_id == 15  # type: ignore[union-attr]


# --- the queue -----------------------------------------------------------------------------------


def test_the_time_in_the_queue_is_told_for_each_attempt(tmp_path: Path) -> None:
    first = begun(tmp_path, "0")
    first.judge()
    first.act("requeue")
    second = RunJournal(tmp_path, label="1", clock=Clock(first.clock.now_s + 12.0))
    second.start(start_time_s=int(first.clock.now_s) + 10, submit_time_s=SUBMITTED_S)
    second.judge()

    report = load(tmp_path, "12")
    text = job_text(report, Page(), verbose=True)

    assert [run.queued_s for run in report.runs] == [40.0, pytest.approx(10.0, abs=1.0)]
    assert "-2.0  started by Slurm after 40 s in the queue" in text

    begun(tmp_path / "clocks contradict it", "0", queued_s=-60)
    assert load(tmp_path / "clocks contradict it", "12").runs[0].queued_s is None


def test_a_node_whose_file_cannot_be_read_is_still_reported(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path)
    for node in ("n2", "n4"):
        journal.path_of(run.directory, node).unlink()
    journal.path_of(run.directory, "n4").mkdir()

    report = load(tmp_path, "12")
    text = job_text(report, Page(), verbose=True)

    assert [node.node for node in report.nodes] == ["n1", "n2", "n4", "n5", "n6"]
    assert report.nodes[1].figures == {}
    assert report.runs[0].judged
    assert report.runs[0].missing[0] == "n2: no file"
    assert report.runs[0].missing[1].startswith("n4: cannot be read: n4.jsonl")
    assert "missing in the journal of attempt 1: n2: no file" in text


def test_lines_of_others_are_skipped(tmp_path: Path) -> None:
    first, _ = write_requeued_job(tmp_path)
    before = load(tmp_path, "12")
    for path in first.directory.iterdir():
        foreign = (
            b'\x00\xff\n[1]\n{"v":1,"id":"x:1","time_s":1.0,"kind":"from_another_tool"}\n{"v":1,'
        )
        path.write_bytes(path.read_bytes() + foreign)
    found = load(tmp_path, "12")

    (damage,) = found.runs[0].missing
    assert damage == "n[1-5],master,requeue,supervisor: damaged lines, left out: 16"
    assert replace(found, runs=(replace(found.runs[0], missing=()), found.runs[1])) == before


NEWER = b'{"v":2,"id":"n1:9","time_s":1.0,"kind":"sampled"}\n'


def test_of_a_newer_journal_is_shown_what_can_be_read(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path)
    for writer in ("n1", "n4", journal.MASTER):
        with journal.path_of(run.directory, writer).open("ab") as file:
            file.write(NEWER)

    (found,) = load(tmp_path, "12").runs

    assert found.judged
    assert found.missing == (
        "n[1,4],master: lines of a newer slurm-health (version 2), left out: 3",
    )


def test_a_journal_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    journal.path_of(run.directory, journal.MASTER).write_bytes(NEWER)

    with pytest.raises(RecordTooNew, match="holds records of version 2"):
        load(tmp_path, "12")


def test_a_node_name_never_leads_out_of_the_run(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1"])
    journal.Writer(tmp_path, "outside", run.clock).append(AgentsLaunched(launch=0, nodes=[]))
    run.master(run_started(["n1", "../../../outside"]))

    assert list(read_run(run.directory).nodes) == ["n1"]


@pytest.mark.root
def test_root_reads_the_same_of_another_users_journal(tmp_path: Path) -> None:
    run = write_requeued_job(tmp_path)[-1].directory
    own = load(tmp_path, "12", now_s=2e9)
    given_to(1, run.parent)
    assert load(tmp_path, "12", now_s=2e9) == own


@pytest.mark.root
def test_what_another_users_journal_takes_of_memory_is_limited(tmp_path: Path) -> None:
    run = write_healthy_run(tmp_path).directory
    given_to(1, run.parent)

    with pytest.raises(JournalError, match="not read: it takes more than 4 GiB of memory"):
        read.guarded(run.parent, lambda: bytes(1 << 33), bytes)


def test_a_journal_that_goes_once_it_was_found_is_an_error_with_its_path(tmp_path: Path) -> None:
    gone = tmp_path / "lab" / "12"

    with pytest.raises(JournalError, match="lab/12: cannot be read: No such file"):
        read.guarded(gone, lambda: b"", bytes)


@pytest.mark.root
def test_what_is_wrong_with_another_users_journal_is_told_as_of_ones_own(tmp_path: Path) -> None:
    run = RunJournal(tmp_path).directory
    path = journal.path_of(run, journal.MASTER)
    path.unlink()
    path.mkdir()
    with pytest.raises(JournalError) as own:
        load(tmp_path, "12")
    given_to(1, run.parent)

    with pytest.raises(JournalError) as theirs:
        load(tmp_path, "12")

    assert str(theirs.value) == str(own.value)


# --- a journal that is still written, or whose writers died, makes no report lie ------------------


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with TemporaryDirectory() as directory:
        write_requeued_job(Path(directory))
        yield Path(directory)


def rendered(report: Story) -> list[str]:
    texts = [job_text(report, Page(width=80, colour=True)), as_json(job_document(report))]
    texts.append(job_text(report, Page(unicode=False), verbose=True))
    for run in report.runs:
        texts += [check_text(run, Page()), headline(run)]
    return texts


def faulty(report: Story) -> set[str]:
    return {node for run in report.runs for node in run.named(Level.FAULTY)} | {
        node.node for node in report.nodes if node.level is Level.FAULTY
    }


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_a_journal_cut_anywhere_accuses_nobody_new(root: Path, data: st.DataObject) -> None:
    complete = load(root, "12")
    with TemporaryDirectory() as directory:
        # A journal of its own for each example would wait for the disk at each record.
        shutil.copytree(root, directory, dirs_exist_ok=True)
        for path in sorted((Path(directory) / "lab" / "12").glob("*/*")):
            content = path.read_bytes()
            cut = data.draw(st.integers(0, len(content)) | st.just(len(content)), path.name)
            path.write_bytes(content[:cut])

        now_s = data.draw(st.none() | st.floats(0.0, 4.0e9), "now_s")
        report = load(Path(directory), "12", now_s=now_s)

    assert all(rendered(report))
    assert faulty(report) <= faulty(complete)
    assert all(run.judged or not run.named(Level.HEALTHY) for run in report.runs)


def test_a_master_file_cut_in_and_behind_every_record_is_reported(root: Path) -> None:
    # That a cut at any byte leaves whole records or none is the journal's own test.
    path = journal.path_of(root / "lab" / "12" / "0", journal.MASTER)
    content = path.read_bytes()
    complete = faulty(load(root, "12"))
    lines = content.splitlines(keepends=True)
    ends = list(accumulate(len(line) for line in lines))
    cuts = {0, *ends, *(end - len(line) // 2 for end, line in zip(ends, lines, strict=True))}
    assert len(cuts) > 2 * 10
    try:
        for cut in sorted(cuts):
            path.write_bytes(content[:cut])
            report = load(root, "12")
            assert job_text(report, Page())
            assert faulty(report) <= complete
    finally:
        path.write_bytes(content)


_ACTIONS = st.sampled_from(["drain", "exclude", "requeue", "hold", "proceed", "notify", ""])
_NAMES = st.lists(st.sampled_from(["n1", "n2", "n3", "n9"]), max_size=3, unique=True)


@settings(max_examples=60)
@given(
    acts=st.lists(st.tuples(_ACTIONS, _NAMES), max_size=6),
    levels=st.lists(st.sampled_from(Level), min_size=3, max_size=3),
    disposition=st.sampled_from(["proceed", "requeue", "stop", "later"]),
)
def test_any_order_of_acts_has_a_text(
    acts: list[tuple[str, list[str]]], levels: list[Level], disposition: str
) -> None:
    with TemporaryDirectory() as directory:
        run = RunJournal(Path(directory), nodes=["n1", "n2", "n3"])
        run.start()
        run.write("n1", NodeReported(node="n1", round=0, outcome=Outcome.NOT_RUN))
        judged = zip(run.nodes, levels, strict=True)
        run.judge(*(NodeVerdict(node=node, level=level, reason="x") for node, level in judged))
        for action, nodes in acts:
            run.act(action, nodes)
        run.finish(disposition)
        report = load(Path(directory), "12")

    assert all(rendered(report))
    done = [act for act in report.runs[0].actions if act.progress.value == "done"]
    assert len(done) == len(acts)
