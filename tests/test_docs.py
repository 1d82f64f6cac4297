# SPDX-License-Identifier: Apache-2.0
"""The documentation names what exists: every link leads somewhere, every command is described."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from slurm_health.cli.main import commands
from slurm_health.core.probe_catalog import BUILT_IN, SETS
from slurm_health.core.records import KINDS
from tests.support.supervised import write_executable

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/lab/*.md")])
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_every_command_a_person_calls_is_in_the_documentation() -> None:
    import click

    text = "\n".join(page.read_text() for page in PAGES)
    context = click.Context(commands)
    names = [
        name
        for name in commands.list_commands(context)
        if (command := commands.get_command(context, name)) and not command.hidden
    ]
    assert names
    undocumented = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert undocumented == []


def test_every_kind_of_record_is_in_the_page_about_the_journal() -> None:
    text = (ROOT / "docs/reference/journal.md").read_text()
    kinds = {str(kind.__struct_config__.tag) for kind in KINDS}
    assert {kind for kind in kinds if f"`{kind}`" not in text} == set()


def test_every_probe_and_every_set_of_them_is_described() -> None:
    text = (ROOT / "docs/reference/probes.md").read_text()
    names = [*SETS, *(probe.name for probe in BUILT_IN)]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_program_that_is_shown_as_a_probe_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs/reference/probes.md").read_text()
    script = textwrap.dedent(text[text.index("    #!/bin/sh") : text.index("**A Python file**")])
    program = write_executable(tmp_path / "scratch.sh", script.replace("/scratch", str(tmp_path)))

    assert subprocess.run([program], check=False, timeout=60).returncode == 0
    write_executable(program, script.replace("/scratch", "/nonexistent"))
    assert subprocess.run([program], check=False, timeout=60, capture_output=True).returncode == 77
