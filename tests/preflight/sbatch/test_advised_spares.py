# SPDX-License-Identifier: Apache-2.0
"""`--spares=auto`: as many as the history advises, and none where it says too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.preflight.sbatch.advised_spares import advised, hours_of, nodes_of, rates_of
from slurm_health.records.standings import Counted, Rates, written

NOW_S = 1_700_000_000.0


def rates(starts: float = 800, bad: int = 4, hours: float = 8000, failed: int = 2) -> Rates:
    """Return what a history of so many starts and hours says."""
    return Rates(
        days=28,
        nodes=200,
        starts=Counted(events=bad, exposure=starts, nodes=bad),
        hours=Counted(events=failed, exposure=hours, nodes=failed),
    )


def test_the_advice_is_that_of_the_page_that_checks_it_by_hand() -> None:
    count, said = advised(rates(), 64, keep=False, time_limit="", room=None)
    assert count == 2
    assert said == "2 spares for 64 nodes: 0.5 of 100 starts of a job on a node found it bad"


def test_spares_that_are_kept_count_what_fails_within_the_time_limit() -> None:
    short, _ = advised(rates(), 64, keep=True, time_limit="60", room=None)
    long, said = advised(rates(), 64, keep=True, time_limit="2-0", room=None)
    assert short < long
    assert said.endswith("6 failed in 1,000 node-days, for 48 h")


def test_too_few_hours_of_scripts_leave_the_spares_of_the_start() -> None:
    count, said = advised(rates(hours=10, failed=0), 64, keep=True, time_limit="", room=None)
    assert count == 2
    assert said.endswith("too few hours of scripts are known (10 of 1000)")


def test_with_too_few_starts_there_are_no_spares_and_it_says_so() -> None:
    count, said = advised(rates(starts=99, bad=1), 64, keep=False, time_limit="", room=None)
    assert count == 0
    assert said == "no spares: only 99 starts of a job on a node are known, and 100 are needed"


def test_no_more_nodes_are_asked_for_than_a_job_may_have() -> None:
    count, said = advised(rates(), 64, keep=False, time_limit="", room=65)
    assert count == 1
    assert said.startswith("1 spare for 64 nodes, fewer than the 2 advised: a job may have 65")


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("90", 1.5),
        ("90:00", 1.5),
        ("1:30:00", 1.5),
        ("2-12", 60.0),
        ("1-0:30", 24.5),
        ("0", None),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, hours: float | None) -> None:
    assert hours_of(text) == hours


@pytest.mark.parametrize(("text", "nodes"), [("4", 4), ("3-5", 5), ("4k", None), ("", None)])
def test_the_nodes_of_a_job_are_the_most_that_it_asks_for(text: str, nodes: int | None) -> None:
    assert nodes_of({"nodes": text}) == nodes


def test_the_rates_are_those_that_the_site_publishes(tmp_path: Path) -> None:
    path = tmp_path / "standings.json"
    path.write_bytes(written({}, {"here": rates()}, now_s=NOW_S))
    assert rates_of(path, "here", now_s=NOW_S) == rates()
    assert rates_of(path, "there", now_s=NOW_S) == f"{path} has nothing of cluster there"


def test_why_nothing_is_known_is_said(tmp_path: Path) -> None:
    path = tmp_path / "standings.json"
    assert rates_of(path, "here", now_s=NOW_S) == f"{path}: No such file or directory"
    assert "publishes no history" in str(rates_of(None, "here", now_s=NOW_S))
    path.write_bytes(written({}, {"here": rates()}, now_s=NOW_S - 30 * 86400))
    assert "it was written 30 days ago" in str(rates_of(path, "here", now_s=NOW_S))
    path.chmod(0o666)
    assert "others than root and you can write it" in str(rates_of(path, "here", now_s=NOW_S))
