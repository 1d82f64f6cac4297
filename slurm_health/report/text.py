# SPDX-License-Identifier: Apache-2.0
"""The report as text: the summary first, then its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_health.report import sentences, tables
from slurm_health.report.layout import Page
from slurm_health.report.story import Run, Story
from slurm_health.report.summary import acts_texts


def job_text(story: Story, page: Page, *, verbose: bool = False, followed: bool = False) -> str:
    """Return the report of a job, without a newline at its end.

    `verbose`: with all evidence, every round and what could not be collected; `followed`: it is
    drawn anew while the job runs.
    """
    missing = []
    for run in story.runs:
        which = sentences.attempt_text(run.attempt, run.check)
        if run.missing:
            missing.append(f"missing in the journal of {which}: {'; '.join(run.missing)}")
    summary = page.titled(tables.summary_rows(story, followed=followed))
    blocks = [
        _paragraphs([story.last.unseen] if story.last.unseen else [], page),
        [*page.phrases(tables.title_of(story)), *summary],
        _paragraphs(missing, page),
    ]
    below = (t for t in tables.tables_of(story, verbose=verbose) if len(t.rows) > 1)
    return _joined([*blocks, *(page.table(table.rows, table.align) for table in below)])


def check_text(run: Run, page: Page) -> str:
    """Return the report of one check, as `slurm-health check` prints it at its end."""
    alone = Story(job="", cluster="", runs=(run,), nodes=run.nodes)
    first = "; ".join([headline(run), *acts_texts(alone)])
    kinds = sentences.links_text(run.paths, run.leaves)
    links = [f"{k}: {v.reason}" for k, v in zip(kinds, (*run.paths, *run.leaves), strict=True)]
    table = tables.nodes_table(run.nodes)
    return _joined(
        [
            _paragraphs([run.unseen] if run.unseen else [], page),
            page.paragraph(first),
            page.table(table.rows) if run.nodes else [],
            _paragraphs([*links, *(verdict.reason for verdict in run.storage)], page),
        ]
    )


def headline(run: Run) -> str:
    """Return one check in one line: `n[1-5]: 3 rounds, 6.1 s: n3 faulty`."""
    nodes = sentences.nodes_text([node.node for node in run.nodes])
    parts = (nodes, sentences.effort_text(run), sentences.levels_text(run))
    return ": ".join(filter(None, parts))


def _joined(blocks: Sequence[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _paragraphs(texts: Iterable[str], page: Page) -> list[str]:
    return [line for text in texts for line in page.paragraph(text)]
