# SPDX-License-Identifier: Apache-2.0
"""What the health check leaves for monitoring."""

from pathlib import Path

import pytest

from slurm_health.node import shared
from slurm_health.node.hooks import healthcheck, metrics, nodes
from slurm_health.node.rules.breaker import DrainLedger, Trip
from slurm_health.node.rules.finding import CheckResult, warned
from slurm_health.system.slurm.client import Client
from tests.support.hooked_node import Node


def values(path: Path) -> dict[str, float]:
    """Return every line of a file of metrics."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def collected(node: Node, tmp_path: Path) -> dict[str, float]:
    return values(tmp_path / "textfile" / "slurm_health.prom")


@pytest.fixture
def watched(node: Node, tmp_path: Path) -> Node:
    """A node whose health check writes metrics."""
    (tmp_path / "textfile").mkdir()
    node.more = f'[metrics]\ndirectory = "{tmp_path}/textfile"\n'
    return node


def test_a_node_that_is_well_says_so_and_slurm_is_asked_nothing(
    watched: Node, tmp_path: Path
) -> None:
    assert not watched.healthcheck()

    found = collected(watched, tmp_path)
    assert found["slurm_health_node_fault"] == 0
    assert found["slurm_health_drained"] == 0
    assert found["slurm_health_last_check_timestamp_seconds"] == watched.now_s
    assert found['slurm_health_check_status{check="memory",shadow="false",status="pass"}'] == 1
    assert watched.slurm.calls() == []
    assert [each.name for each in (tmp_path / "textfile").iterdir()] == ["slurm_health.prom"]


def test_a_fault_and_its_end_show(watched: Node, tmp_path: Path) -> None:
    watched.break_it()
    assert watched.healthcheck()

    found = collected(watched, tmp_path)
    assert (found["slurm_health_node_fault"], found["slurm_health_drained"]) == (1, 1)
    fault = 'slurm_health_check_status{check="scratch",shadow="false",status="node_fault"}'
    assert found[fault] == 1

    watched.mend()
    for _ in range(3):
        watched.now_s += 61
        watched.healthcheck()
    found = collected(watched, tmp_path)
    assert (found["slurm_health_node_fault"], found["slurm_health_drained"], found[fault]) == (
        0,
        0,
        0,
    )


def test_a_breaker_that_has_tripped_shows_on_the_nodes_that_it_keeps(
    watched: Node, tmp_path: Path
) -> None:
    watched.healthcheck()
    assert collected(watched, tmp_path)["slurm_health_breaker_tripped"] == 0

    trip = Trip(time_s=0.0, node="n1", why="x", nodes="n[1-9]")
    shared.change_ledger(
        watched.site, lambda _: (DrainLedger(trips={"gpu": trip}), None), type(None)
    )
    watched.healthcheck()
    assert collected(watched, tmp_path)["slurm_health_breaker_tripped"] == 1

    (watched.shared / "ledger.99").write_text("{")
    watched.healthcheck()
    assert "slurm_health_breaker_tripped" not in collected(watched, tmp_path)


def test_jobs_whose_watch_has_died_are_counted_and_listed(watched: Node, tmp_path: Path) -> None:
    found = warned("since 09:12: 12", unwatched=1, **{"13": "step 7"})
    results = [CheckResult(name="watches", finding=found)]
    last = healthcheck.last_check_of(results, node="n1", now_s=watched.now_s)
    healthcheck.save_last_check(watched.site, last)
    known = Client(watched.environ()).nodes()
    shown = nodes.listing(watched.site, known, watched.now_s)

    (gauge,) = (
        gauge
        for gauge in metrics.gauges(results, now_s=0.0, drained=False, tripped=None)
        if gauge.name == "slurm_health_unwatched_jobs"
    )
    assert [sample.value for sample in gauge.samples] == [1.0]
    assert "n1: since 09:12: 12\njob 13: step 7\n" in nodes.text(shown, watched.now_s)


def test_a_directory_that_is_not_there_changes_nothing(node: Node, tmp_path: Path) -> None:
    node.more = f'[metrics]\ndirectory = "{tmp_path}/nowhere"\n'
    assert not node.healthcheck()
