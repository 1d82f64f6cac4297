# SPDX-License-Identifier: Apache-2.0
"""`slurm-health lemons --prometheus` as it is called."""

from pathlib import Path

import pytest

from tests.cli.test_history import LONG_AGO, called, write_lemon


def test_it_prints_the_standing_of_every_node(tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal")

    done = called(tmp_path, "lemons", "--prometheus", LONG_AGO)

    assert done.code == 0, done
    assert 'slurm_health_node_lemon_score{cluster="lab",node="n3"} 28.2\n' in done.stdout
    lemon = 'slurm_health_node_standing{cluster="lab",node="n3",standing="lemon"} 1\n'
    assert lemon in done.stdout
    assert "slurm_health_history_unread_jobs 0\n" in done.stdout


def test_without_a_journal_it_says_that_it_looked(tmp_path: Path) -> None:
    done = called(tmp_path, "lemons", "--prometheus")

    assert done.code == 0
    assert "slurm_health_history_timestamp_seconds" in done.stdout
    assert "slurm_health_node_jobs" not in done.stdout


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal", jobs=3)
    path = tmp_path / "out" / "slurm_health_history.prom"
    path.parent.mkdir()
    path.write_text("old")

    assert called(tmp_path, "lemons", "--prometheus", LONG_AGO, f"--output={path}").stdout == ""

    assert path.read_text().startswith("# HELP ")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("path", ["/nowhere/at/all.prom", "/proc/x.prom"])
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, path: str) -> None:
    done = called(tmp_path, "lemons", "--prometheus", f"--output={path}")

    assert done.code == 4
    assert "cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
