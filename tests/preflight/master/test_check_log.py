# SPDX-License-Identifier: Apache-2.0
"""A check's verdict in the machine's log, where the site wants it there."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.master import check_log
from slurm_health.preflight.master.check_log import end_text
from slurm_health.records.records import (
    Disposition,
    JobOutcome,
    NodeReported,
    ProbeUsed,
    Rendezvous,
    RoundStarted,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict, Outcome
from tests.support.command_line import DEADLINE_S

STARTED = RunStarted(
    run_id="4711.0", job_id=4711, attempt=0, cluster="a", partition="gpu",
    nodes=["n1", "n2", "n3"], master_node="n1", user="ml",
)  # fmt: skip
# A /dev in which something listens at /dev/log, for one process and its children.
WITH_LOG = """
mount -t tmpfs none "$1"
cp -a /dev/null /dev/zero /dev/random /dev/urandom "$1"
mkdir "$1/shm"; ln -s /proc/self/fd "$1/fd"
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[socket.socket]:
    """A machine's log that listens at `log`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "log"))
        listening.setblocking(False)
        yield listening


def documents(log: socket.socket) -> list[dict[str, Any]]:
    """Return the objects of all lines that have come."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            line = log.recv(4096).decode()
        except BlockingIOError:
            return found
        head, _, rest = line.partition("{")
        assert head in {"<28>slurm-health: ", "<30>slurm-health: "}
        found.append(json.loads("{" + rest))


def test_each_bad_node_has_a_line_and_so_has_the_check(log: socket.socket, tmp_path: Path) -> None:
    verdict = VerdictReached(
        nodes=[
            NodeVerdict(node="n1", level=Level.HEALTHY),
            NodeVerdict(node="n2", level=Level.FAULTY, component="network", reason='a\n"b" ' * 500),
            NodeVerdict(node="n3", level=Level.INCONCLUSIVE, reason="too few partners"),
        ]
    )
    finished = JobOutcome(disposition=Disposition.REQUEUE, exit_code=1, reason="without n2")

    check_log.tell(verdict, STARTED, finished, to=str(tmp_path / "log"))

    node, check = documents(log)
    job = {"cluster": "a", "job": "4711.0", "user": "ml", "partition": "gpu"}
    assert node.pop("reason").startswith('a "b" a "b"')
    assert node == {
        "verdict": "node", **job, "node": "n2", "level": "faulty", "component": "network"
    }  # fmt: skip
    assert check == {
        "verdict": "check", **job, "disposition": "requeue", "reason": "without n2",
        "nodes": "n[1-3]", "healthy": 1, "slow": 0, "faulty": 1, "inconclusive": 1,
    }  # fmt: skip


def test_nobody_who_listens_is_no_error(tmp_path: Path) -> None:
    finished = JobOutcome(disposition=Disposition.PROCEED, exit_code=0)
    check_log.tell(VerdictReached(nodes=[]), STARTED, finished, to=str(tmp_path / "nothing"))


@pytest.mark.heavy
@pytest.mark.torch
@pytest.mark.skipif(os.getuid() != 0, reason="only root may put a log of its own at /dev/log")
@pytest.mark.parametrize(("wanted", "lines"), [("true", 1), ("false", 0)])
def test_a_check_writes_it_only_where_the_site_wants_it(
    log: socket.socket, tmp_path: Path, wanted: str, lines: int
) -> None:
    site, device = tmp_path / "config.toml", tmp_path / "dev"
    site.write_text(f"[metrics]\nsyslog_json = {wanted}\n")
    device.mkdir()
    script = f'set -e\n{WITH_LOG}\ntouch "$1/log"; mount --bind "$2" "$1/log"\n'
    script += 'mount --rbind "$1" /dev\nshift 2\nexec "$@"'
    words = [sys.executable, "-m", "slurm_health", "check", "--local=2", "--check=matmul"]
    words += [f"--journal={tmp_path / 'journal'}", f"--python={sys.executable}"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(device), str(tmp_path / "log"), *words],
        env={**os.environ, "SLURM_HEALTH_CONFIG": str(site), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode in {0, 1, 3}, done
    checks = [each for each in documents(log) if each["verdict"] == "check"]
    assert len(checks) == lines, done
    assert [each["nodes"] for each in checks] == ["local[0-1]"] * lines


def reports(**took_s: float) -> dict[str, NodeReported]:
    return {
        node: NodeReported(round=1, node=node, outcome=Outcome.MEASURED, elapsed_ms=1000 * seconds)
        for node, seconds in took_s.items()
    }


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([["n1"], ["n2"]], "round 3: n[1-2]: values, matmul"),
        ([["n1", "n2"], ["n3", "n4"]], "round 3: pairs n[1-2] n[3-4]: values, matmul"),
        ([["n1", "n2", "n3"], ["n4", "n5"]], "round 3: groups n[1-3] n[4-5]: values, matmul"),
        (
            [[f"n{2 * number}", f"n{2 * number + 1}"] for number in range(65)],
            "round 3: 65 pairs: values, matmul",
        ),
    ],
)
def test_a_round_says_whether_nodes_are_measured_by_themselves_or_together(
    groups: list[list[str]], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    meet = Rendezvous(address="n1", port=1)
    started = RoundStarted(
        round=4,
        name="round 3",
        groups=groups,
        rendezvous=[meet for _ in groups],
        deadline_s=1.0,
        probes=[ProbeUsed(name="values", scope="solo"), ProbeUsed(name="matmul", scope="solo")],
    )

    with caplog.at_level(logging.INFO, logger="slurm_health"):
        check_log.log_record(started)

    assert caplog.messages == [said]


def test_each_node_is_told_with_its_seconds_and_those_that_said_nothing() -> None:
    assert end_text(reports(n2=2.21, n1=1.0), ["n3"]) == (
        "elapsed n2 2.2 s, n1 1.0 s; no answer from n3"
    )


def test_a_report_that_came_after_the_end_of_its_round_does_not_count() -> None:
    assert end_text(reports(n1=9.0), ["n1"]) == "no answer from n1"
