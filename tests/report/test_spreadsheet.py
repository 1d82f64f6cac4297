# SPDX-License-Identifier: Apache-2.0
"""The report as CSV: a line per node and round, with columns that stay."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.build import job_report
from slurm_health.report.find import load
from slurm_health.report.read import read_run
from slurm_health.report.spreadsheet import COLUMNS, as_csv
from tests.report.golden import REPOSITORY
from tests.support.journals import RunJournal, write_healthy_run, write_requeued_job

PAGE = REPOSITORY / "docs" / "reference" / "report.md"


def rows(root: Path, *jobs: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv([load(root, job) for job in jobs]))))


def test_each_node_has_a_line_for_each_round_it_was_in(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)

    found = rows(tmp_path, "12")

    assert [(row["attempt"], row["round"], row["node"]) for row in found[:6]] == [
        ("0", "0", "n1"),
        ("0", "0", "n2"),
        ("0", "0", "n3"),
        ("0", "0", "n4"),
        ("0", "1", "n1"),
        ("0", "1", "n3"),
    ]
    assert len(found) == 3 * 4 + 2 * 4
    assert found[2] == {
        "cluster": "lab",
        "job": "12",
        "attempt": "0",
        "check": "1",
        "round": "0",
        "phase": "",
        "node": "n3",
        "partners": "n4",
        "outcome": "timed_out",
        "started_s": "1700000000.5",
        "elapsed_s": "1.6",
        "allgather_gb_per_s": "",
        "rail_allgather_gb_per_s": "",
        "node_allgather_gb_per_s": "",
        "matmul_gflop_per_s": "48",
        "memory_copy_gb_per_s": "",
        "gpt_step_ms": "",
        "level": "faulty",
        "component": "network",
        "reason": "no allgather with n4, n1 (timed out)",
    }


def test_a_nodes_bandwidth_with_a_bad_partner_is_told_too(tmp_path: Path) -> None:
    """The table leaves it out of what a healthy node reached; here the partner stands beside it."""
    run = RunJournal(tmp_path, nodes=["n1", "n2", "n3"])
    run.start()
    run.begin_round(0, [["n1", "n2"]])
    run.measure(0, ["n1", "n2"], allgather_gb_per_s=0.1)
    run.end_round(0)
    run.judge(NodeVerdict(node="n2", level=Level.SLOW, reason="slow", evidence=("round 0",)))

    found = {row["node"]: row["allgather_gb_per_s"] for row in rows(tmp_path, "12")}

    assert found == {"n1": "0.1", "n2": "0.1"}


def test_text_is_never_a_formula_nor_a_second_line(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1"])
    run.start()
    run.begin_round(0, [["n1"]])
    reason = "=HYPERLINK(1)\nnext, line"
    run.judge(NodeVerdict(node="n1", level=Level.INCONCLUSIVE, reason=reason))

    (row,) = rows(tmp_path, "12")

    assert row["reason"] == "'=HYPERLINK(1) next, line"
    assert row["outcome"] == ""


def test_no_cell_has_a_formula_or_a_control_character(tmp_path: Path) -> None:
    bad = "=HYPERLINK(1)\x1b[2J"
    run = RunJournal(tmp_path, cluster="=1\x1b[2J+1", nodes=[bad])
    run.start()
    run.begin_round(0, [[bad]])
    run.judge(NodeVerdict(node=bad, level=Level.SLOW, component=bad, reason=bad))

    report = job_report([read_run(run.directory)])
    cells = [cell for row in csv.reader(io.StringIO(as_csv([report]))) for cell in row]

    assert "'=HYPERLINK(1) [2J" in cells
    assert not [each for each in cells if each.startswith(("=", "+", "@")) or "\x1b" in each]


def test_several_jobs_are_one_table(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=12)
    write_healthy_run(tmp_path, job=13)

    assert {row["job"] for row in rows(tmp_path, "12", "13")} == {"12", "13"}


def test_every_column_is_described(tmp_path: Path) -> None:
    described = PAGE.read_text(encoding="utf-8").partition("## Columns of --csv")[2]

    assert [name for name in COLUMNS if f"`{name}`" not in described] == []
