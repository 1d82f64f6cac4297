# SPDX-License-Identifier: Apache-2.0
"""`slurm-health history` and `lemons` as they are called."""

import json
import time
from pathlib import Path

from slurm_health.records.verdict import Level, NodeVerdict
from tests.support.command_line import Done, slurm_health
from tests.support.journals import Clock, RunJournal, write_healthy_run
from tests.support.rows import rows

DAY_S = 86400
NODES = ("n1", "n2", "n3", "n4", "n5")
LONG_AGO = "--days=3650"  # the journals of these tests are years old


def write_lemon(root: Path, node: str = "n3", *, jobs: int = 12) -> None:
    """Write jobs on five nodes, one a day; one node is slow in every second one."""
    for number in range(jobs):
        clock = Clock(1_700_000_000.0 + number * DAY_S)
        run = RunJournal(root, job=100 + number, nodes=NODES, clock=clock)
        run.start()
        slow = NodeVerdict(
            node=node, level=Level.SLOW, component="compute", reason="1.4 times as slow"
        )
        run.judge(*([slow] if number % 2 else []))
        run.finish("proceed")


def called(tmp_path: Path, *words: str, **environ: str) -> Done:
    usual = {
        "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    return slurm_health(*words, environ={**usual, **environ})


def published(tmp_path: Path, *words: str) -> Done:
    """Call `lemons --publish` where the site has its standings beside its journals."""
    site = tmp_path / "config.toml"
    site.write_text(f'standings = "{tmp_path}/standings.json"\n')
    return called(tmp_path, "lemons", *words, "--publish", SLURM_HEALTH_CONFIG=str(site))


def test_a_lemon_is_named_with_what_speaks_against_it(tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal")

    done = called(tmp_path, "lemons", LONG_AGO)

    assert done.code == 1, done
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("n3")]
    assert row.split()[:5] == ["n3", "lemon", "28.2", "12", "6"]
    assert "slow 6" in row
    assert "clear: n[1-2,4-5]" in done.stdout
    lemons = json.loads(called(tmp_path, "lemons", LONG_AGO, "--json").stdout)
    worst = lemons["clusters"][0]["nodes"][0]
    assert (worst["node"], worst["level"], worst["signals"]) == ("n3", "lemon", {"slow": 6})
    outside = called(tmp_path, "lemons")
    assert (outside.code, "n3" in outside.stdout) == (0, False)

    # A cluster without a check in the window is left out beside one with some.
    now = Clock(time.time() - 60)
    write_healthy_run(tmp_path / "journal", cluster="new", nodes=("n1", "n2"), clock=now)
    both = called(tmp_path, "lemons").stdout
    assert both.startswith("new: 2 nodes checked"), both
    assert "lab: 0 nodes" not in both
    assert "no fault seen, but too few jobs to tell: n[1-2]" in both


def test_its_history_says_why_and_shows_the_latest_checks_first(tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal")

    done = called(tmp_path, "history", "n3", LONG_AGO)

    assert done.code == 0, done
    assert "n3 of lab   12 checks of 12 jobs since 2023-11-14   lemon, score 28.2" in done.stdout
    rows = [line.split()[2:5] for line in done.stdout.splitlines() if line.startswith("2023")]
    assert rows[:3] == [
        ["111", "slow", "(compute)"],
        ["110", "healthy", "\N{EN DASH}"],
        ["109", "slow", "(compute)"],
    ]
    assert len(rows) == 12
    read = json.loads(called(tmp_path, "history", "n[3-4]", LONG_AGO, "--json").stdout)
    assert (read["version"], [each["node"] for each in read["nodes"]]) == (3, ["n3", "n4"])
    assert read["nodes"][0]["checks"][1]["reason"] == "1.4 times as slow"
    assert "since 2023-11-14   unknown\n" in called(tmp_path, "history", "n3").stdout


def test_standings_are_published_where_the_site_says(tmp_path: Path) -> None:
    write_lemon(tmp_path / "journal")
    done = published(tmp_path, LONG_AGO)
    assert done.code == 1, done
    told = json.loads((tmp_path / "standings.json").read_text())
    assert told["clusters"] == {
        "lab": {"n3": {"level": "lemon", "score": 28.2, "jobs": 12, "spoiled": 6}}
    }


def test_nothing_is_published_of_no_journal(tmp_path: Path) -> None:
    """As root finds it where journals are in users' homes."""
    file = tmp_path / "standings.json"
    file.write_text("of yesterday")
    done = published(tmp_path)
    assert done.code == 4
    assert "the journals here hold no check" in done.stderr
    assert f"set journal = a shared directory in {tmp_path}/config.toml" in done.stderr
    assert file.read_text() == "of yesterday"


@rows
def test_a_mistake_is_one_line_that_says_what_to_do(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    nothing = called(tmp_path, "lemons")
    assert nothing.code == 0
    assert nothing.stdout.startswith("no check is in the journals that you may read; --journal=DIR")
    write_healthy_run(tmp_path / "journal", nodes=("gpu01", "gpu02"))

    done = called(tmp_path, *words)

    assert (done.code in {2, 4}, done.stdout) == (True, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
