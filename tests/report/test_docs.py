# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from slurm_health.records.verdict import Level
from slurm_health.report.export import as_json
from slurm_health.report.read import load
from slurm_health.report.table import job_text
from tests.report.golden import REPOSITORY, assert_matches_file
from tests.support.journals import write_requeued_job

PAGE = REPOSITORY / "docs" / "howto" / "read-a-report.md"
REFERENCE = REPOSITORY / "docs" / "reference" / "report.md"
EXAMPLE = re.compile(
    r"(?<=<!-- example: written by tests/report/test_docs.py -->\n).*?(?=<!--)", re.S
)


def keys(value: object) -> Iterator[str]:
    """Give every key that occurs anywhere in an object."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def test_the_example_is_what_the_command_prints(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    example = f"```\n$ slurm-health report 12\n{job_text(load(tmp_path, '12'))}\n```\n"

    page = PAGE.read_text(encoding="utf-8")
    true_page = EXAMPLE.sub(lambda _: example, page, count=1)

    assert example in true_page
    assert_matches_file(true_page.removesuffix("\n"), PAGE, tmp_path)


def test_every_key_of_the_object_is_described(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    described = set(re.findall(r"`(\w+)`", REFERENCE.read_text(encoding="utf-8")))

    assert set(keys(json.loads(as_json(load(tmp_path, "12"))))) - described == set()


def test_every_level_is_described() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [level.value for level in Level if f"| `{level.value}` |" not in page] == []
