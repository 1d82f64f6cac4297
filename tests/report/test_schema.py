# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema is the file of the documentation, and every report keeps to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_health.report.export import (
    as_json,
    latest_as_json,
    run_as_json,
    tasks_as_json,
)
from slurm_health.report.latest import latest_jobs
from slurm_health.report.read import load
from tests.report.golden import REPOSITORY, assert_matches_file
from tests.report.json_schema import as_text, schema
from tests.report.test_post_mortem import FOUND
from tests.report.test_table import CASES
from tests.support.journals import RunJournal, write_healthy_run

FILE = REPOSITORY / "docs" / "reference" / "report.schema.json"


def strict() -> Any:
    """Return the schema as it would be if no key might ever be added."""
    found = schema()
    for part in found["$defs"].values():
        if "properties" in part:
            part["additionalProperties"] = False
    return found


def library() -> Any:
    """Return jsonschema, which takes seconds to load: not in each worker that only collects."""
    import jsonschema

    return jsonschema


def assert_valid(text: str) -> None:
    for each in (schema(), strict()):
        library().Draft202012Validator(each).validate(json.loads(text))


def test_the_schema_is_the_one_in_the_documentation(tmp_path: Path) -> None:
    library().Draft202012Validator.check_schema(schema())
    assert_matches_file(as_text().removesuffix("\n"), FILE, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_report_of_a_job_keeps_to_the_schema(tmp_path: Path, name: str) -> None:
    CASES[name](tmp_path)
    report = load(tmp_path, "12")

    assert_valid(as_json(report))
    assert_valid(run_as_json(report.runs[0]))
    assert_valid(tasks_as_json([report], others={"12_[4-9]": "it is pending"}))


def test_a_failed_script_and_its_post_mortem_keep_to_the_schema(tmp_path: Path) -> None:
    run = RunJournal(tmp_path)
    run.start()
    run.run_script(exit_code=1)
    run.write("post-mortem", FOUND)

    assert_valid(as_json(load(tmp_path, "12")))


def test_the_list_of_jobs_keeps_to_the_schema(tmp_path: Path) -> None:
    write_healthy_run(tmp_path)
    RunJournal(tmp_path, job=13)

    latest = latest_jobs(tmp_path, 9, cluster=None, now_s=2e9, environ={})
    assert_valid(latest_as_json(latest.jobs))


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found.pop("runs"),
        lambda found: found.update(schema=2),
        lambda found: found["nodes"][0].update(level="fine"),
        lambda found: found["nodes"][0].update(allgather_gb_per_s=["fast"]),
        lambda found: found["runs"][0]["each_round"][0].pop("groups"),
    ],
)
def test_what_is_no_report_does_not_keep_to_the_schema(
    tmp_path: Path, damage: Callable[[Any], object]
) -> None:
    write_healthy_run(tmp_path)
    found = json.loads(as_json(load(tmp_path, "12")))
    damage(found)

    with pytest.raises(library().ValidationError):
        library().Draft202012Validator(schema()).validate(found)
