# SPDX-License-Identifier: Apache-2.0
"""`slurm-health explain` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command_line import slurm_health


def test_an_xid_is_told_in_a_few_lines_and_to_programs_in_json() -> None:
    done = slurm_health("explain", "sxid", "22003")  # which need no quotes
    one = json.loads(slurm_health("explain", "--json", "31").stdout)

    assert done.stdout.splitlines()[0].startswith("SXid 22003: always fatal")
    assert "the node is drained" in done.stdout
    assert (one["name"], one["status"], one["whose"]) == ("Xid 31", "pass", "program")
    assert len(json.loads(slurm_health("explain", "--json").stdout)) > 50


def test_all_that_is_known_is_a_table() -> None:
    lines = slurm_health("explain").stdout.splitlines()

    assert lines[0].split() == ["NAME", "FINDING", "WHOSE", "WHAT"]
    assert any(line.split()[:2] == ["soft-lockup", "warning"] for line in lines)


@pytest.mark.parametrize("words", [["9999"], ["all is well\x1b[31m"], [""]])
def test_what_no_check_knows_is_a_sentence_and_how_to_ask(words: list[str]) -> None:
    done = slurm_health("explain", *words)

    assert done.code == 2, done
    assert "not known to the checks" in done.stderr
    assert "\x1b" not in done.stderr


def test_which_of_two_files_failed_first_is_not_claimed(tmp_path: Path) -> None:
    for name, error in (("out-0", "KeyError: 'lr'"), ("out-1", "ValueError: bad label 17")):
        text = f'Traceback (most recent call last):\n  File "train.py", line 9, in main\n{error}\n'
        (tmp_path / name).write_text(text)
    both = slurm_health("explain", str(tmp_path)).stdout
    one = slurm_health("explain", str(tmp_path / "out-0")).stdout

    assert "a process failed: KeyError: 'lr'; 1 other failed too; which was first" in both
    assert "a process failed first: KeyError: 'lr'\n" in one
