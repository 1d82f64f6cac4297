# SPDX-License-Identifier: Apache-2.0
"""A journal that is still being written, or whose writers died, never makes a report lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.records.records import NodeReported
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from slurm_health.report.export import as_json, job_document
from slurm_health.report.layout import Page
from slurm_health.report.read import load
from slurm_health.report.story import Story
from slurm_health.report.text import check_text, headline, job_text
from slurm_health.system import journal
from tests.support.journals import RunJournal, write_requeued_job


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
def test_a_journal_cut_anywhere_is_reported_and_accuses_nobody_new(
    root: Path, data: st.DataObject
) -> None:
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
