# SPDX-License-Identifier: Apache-2.0
"""The report for programs: JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.report.build import job_report, run_report
from slurm_health.report.export import COLUMNS, as_csv, as_json, run_as_json, shown
from slurm_health.report.read import load, read_run
from tests.report.golden import DATA, REPOSITORY, assert_matches_file
from tests.support.journals import (
    RunJournal,
    write_healthy_run,
    write_requeued_job,
    write_run_with_a_faulty_node,
)

# Numbers that have no unit: they count, name, or are a ratio.
WITHOUT_UNIT = {
    "schema",
    "job_id",
    "attempt",
    "check",
    "rounds",
    "round",
    "exit_code",
    "signal",
    "slowdown",
    "probability",
    "world_size",
    "flop",
}
UNITS = ("_s", "_ms", "_gb_per_s", "_gflop_per_s", "_bytes")


def numbers(value: object, key: str = "") -> Iterator[str]:
    """Give the key under which each number of an object is found."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key


def test_the_object_of_a_job(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)

    text = as_json(load(tmp_path, "12"))

    assert text.endswith("}\n")
    assert_matches_file(text.removesuffix("\n"), DATA / "requeued.json", tmp_path)


def test_every_number_has_its_unit_in_its_name(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    found = set(numbers(json.loads(as_json(load(tmp_path, "12"), raw=True))))

    assert {name for name in found - WITHOUT_UNIT if not name.endswith(UNITS)} == set()


def test_samples_are_there_only_on_request(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    report = load(tmp_path, "12")

    reduced, raw = (json.loads(as_json(report, raw=raw)) for raw in (False, True))

    assert all("samples" not in run for run in reduced["runs"])
    assert raw["runs"][0]["samples"][0] == {
        "node": "n1",
        "round": 0,
        "group": ["n1", "n2"],
        "probe": "matmul",
        "iteration_ms": [[pytest.approx(41.667, abs=1e-3)] * 3],
        "taken_ms": [],
        "quantity": "",
        "scope": "solo",
        "figures": {},
        "world_size": 2,
        "total_bytes": 0,
        "flop": 2e9,
    }


def test_what_is_not_known_is_null_or_empty_and_never_zero(tmp_path: Path) -> None:
    run = RunJournal(tmp_path, nodes=["n1"])
    run.start()

    found = json.loads(as_json(load(tmp_path, "12")))

    assert found["nodes"] == [
        {
            "node": "n1",
            "run": "0",
            "level": None,
            "reason": "",
            "component": None,
            "slowdown": None,
            "probability": None,
            "evidence": [],
            "hardware": {"model": "", "interface": "", "devices": []},
            "allgather_gb_per_s": [],
            "matmul_gflop_per_s": [],
        }
    ]
    assert found["runs"][0]["duration_s"] is None
    assert found["runs"][0]["script"] is None


def test_one_check_is_the_same_object_as_in_its_job(tmp_path: Path) -> None:
    run = write_run_with_a_faulty_node(tmp_path)

    alone = json.loads(run_as_json(run_report(read_run(run.directory))))

    assert alone == {"schema": 1, **json.loads(as_json(load(tmp_path, "12")))["runs"][0]}


@given(st.dictionaries(st.text(), st.text() | st.integers(), max_size=3))
def test_what_acts_on_a_terminal_is_spelled_out(found: dict[str, object]) -> None:
    text = shown(json.dumps(found, ensure_ascii=False, indent=2))

    assert json.loads(text) == found
    assert all(each.isprintable() for each in text.split("\n"))


def test_letters_of_all_languages_stay() -> None:
    assert shown('["é “x”\u202e\x9b[31m\U000e0001"]') == (
        '["é “x”\\u202e\\u009b[31m\\udb40\\udc01"]'
    )


def test_nothing_in_a_report_acts_on_a_terminal(tmp_path: Path) -> None:
    RunJournal(tmp_path, nodes=("n1", "n2")).start(script="/a\x9b31m\u202eb")

    text = as_json(load(tmp_path, "12"))

    assert "\\u009b31m\\u202eb" in text
    assert all(each.isprintable() for each in text.split("\n"))


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
