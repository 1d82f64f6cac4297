# SPDX-License-Identifier: Apache-2.0
"""The report for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slurm_health.report.build import run_report
from slurm_health.report.export import as_json, run_as_json, shown
from slurm_health.report.read import load, read_run
from tests.report.golden import DATA, assert_matches_file
from tests.support.journals import (
    RunJournal,
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
    found = set(numbers(json.loads(as_json(load(tmp_path, "12")))))

    assert {name for name in found - WITHOUT_UNIT if not name.endswith(UNITS)} == set()


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
