# SPDX-License-Identifier: Apache-2.0
"""What the health check leaves for monitoring."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from slurm_health.node import shared
from slurm_health.node.hooks import healthcheck, metrics, nodes
from slurm_health.node.hooks.log import Log
from slurm_health.node.rules.breaker import DrainLedger, Trip
from slurm_health.node.rules.finding import CheckResult, inconclusive, node_fault, passed, warned
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


def test_each_conclusion_is_a_line_of_json_in_the_machines_log(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslogd:
        syslogd.bind(path)
        syslogd.settimeout(20)
        Log("prolog", "n3", "12", to=path).verdicts(
            [
                CheckResult(name="memory", finding=passed("512 GiB"), elapsed_ms=1.26),
                CheckResult(name="gpu", finding=node_fault('"lost"\n\x1b[2J' + "é" * 3000)),
                CheckResult(name="nfs", finding=inconclusive("silent"), shadow=True),
            ]
        )
        lines = [syslogd.recv(4096).decode() for _ in range(3)]

    heads, documents = zip(*(re.split(r"(?=\{)", line, maxsplit=1) for line in lines), strict=True)
    assert heads == ("<30>slurm-health: ", "<27>slurm-health: ", "<28>slurm-health: ")
    found = [json.loads(each) for each in documents]
    assert found[0] == {
        "hook": "prolog",
        "node": "n3",
        "job": "12",
        "check": "memory",
        "status": "pass",
        "shadow": False,
        "text": "512 GiB",
        "elapsed_ms": 1.3,
    }
    assert [each["status"] for each in found] == ["pass", "node_fault", "inconclusive"]
