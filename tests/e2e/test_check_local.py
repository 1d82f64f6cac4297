# SPDX-License-Identifier: Apache-2.0
"""`slurm-health check --local 4` with torch: what a person sees, and what broken parts do to it.

Four agents share this machine, so figures are noisy: a node may be called undecided, or slow
where the machine does other work besides. Nothing here depends on figures; who is blamed for a
process that died or hung does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    Record,
    RoundStarted,
    WorkersReady,
)
from slurm_health.system import journal
from tests.support.command_line import Done, finish, slurm_health, start
from tests.support.supervised import descendants, eventually

pytestmark = [pytest.mark.torch, pytest.mark.timeout(110)]

FAKE_WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"
NODES = ("local0", "local1", "local2", "local3")
# healthy, a slow neighbour on a busy machine, undecided
HONEST = {0, 1, 3}


class Check:
    """One check of this machine, running."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "journal"
        self.process = start(
            "check",
            "--local=4",
            "--json",
            f"--journal={self.root}",
            f"--python={sys.executable}",
            "--round-deadline=10",
            environ={"CUDA_VISIBLE_DEVICES": ""},
        )

    @property
    def run(self) -> Path:
        """The run's directory, once it is there."""
        found: list[Path] = []

        def there() -> bool:
            found[:] = self.root.glob("local/*/0")
            return bool(found)

        eventually(there, "the run's directory")
        return found[0]

    def records(self, writer: str, kind: type[Record]) -> list[Any]:
        entries = journal.read_all(self.run, writer)
        return [entry.record for entry in entries if isinstance(entry.record, kind)]

    def wait_for(self, writer: str, kind: type[Record], count: int = 1) -> None:
        def there() -> bool:
            return len(self.records(writer, kind)) >= count

        eventually(there, f"{count} {kind.__name__} of {writer}")

    def agent(self, node: str) -> int:
        return next(pid for pid in descendants(self.process.pid) if _plays(pid, node))

    def worker(self, node: str) -> int:
        (pid,) = descendants(self.agent(node))
        return pid

    def end(self) -> tuple[Done, dict[str, dict[str, Any]]]:
        """Wait for the end; return it with what is concluded of each node."""
        done = finish(self.process)
        assert "Traceback" not in done.stderr, done.stderr
        return done, {node["node"]: node for node in json.loads(done.stdout)["nodes"]}


@pytest.fixture
def check(tmp_path: Path) -> Iterator[Check]:
    check = Check(tmp_path)
    yield check
    for pid in [*descendants(check.process.pid), check.process.pid]:
        if check.process.poll() is None:
            os.kill(pid, signal.SIGKILL)
    check.process.communicate()


def not_faulty(nodes: dict[str, dict[str, Any]], but: str = "") -> None:
    faulty = {name for name, node in nodes.items() if node["level"] == "faulty"}
    assert faulty <= {but}, nodes


def test_a_machine_that_is_well_is_checked_and_reported(tmp_path: Path) -> None:
    done = slurm_health(
        "check", "--local=4", f"--journal={tmp_path}", environ={"CUDA_VISIBLE_DEVICES": ""}
    )

    assert done.code in HONEST, done
    (job,) = (path.name for path in (tmp_path / "local").iterdir())
    told = slurm_health("report", job, f"--journal={tmp_path}", "--json")
    report = json.loads(told.stdout)
    nodes = {node["node"]: node for node in report["nodes"]}
    assert set(nodes) == set(NODES)
    not_faulty(nodes)
    assert all(node["allgather_gb_per_s"] and node["matmul_gflop_per_s"] for node in nodes.values())
    assert [run["exit_code"] for run in report["runs"]] == [done.code]
    table = slurm_health("report", job, f"--journal={tmp_path}")
    for line in _table(done.stdout):
        assert line in table.stdout


@pytest.mark.heavy
def test_a_worker_that_is_killed_in_a_round_is_its_own_nodes_matter(check: Check) -> None:
    check.wait_for("master", RoundStarted)
    os.kill(check.worker("local2"), signal.SIGKILL)

    done, nodes = check.end()

    assert done.code in HONEST
    not_faulty(nodes, but="local2")
    assert len(check.records("local2", WorkersReady)) == 2


@pytest.mark.heavy
def test_a_worker_that_hangs_again_and_again_is_a_faulty_node_and_its_partners_are_well(
    check: Check,
) -> None:
    stopped: set[int] = set()
    check.wait_for("master", RoundStarted)
    agent = check.agent("local1")

    def stop_and_see_the_end() -> bool:
        for pid in descendants(agent):
            # A worker that is still loading would not be found hanging, but not ready.
            if pid not in stopped and len(check.records("local1", WorkersReady)) > len(stopped):
                os.kill(pid, signal.SIGSTOP)
                stopped.add(pid)
        return check.process.poll() is not None

    _until(stop_and_see_the_end)

    done, nodes = check.end()
    assert done.code == 1
    assert len(stopped) >= 2
    assert nodes["local1"]["level"] == "faulty", nodes
    not_faulty(nodes, but="local1")


@pytest.mark.heavy
def test_an_agent_that_is_killed_is_named_and_started_again(check: Check) -> None:
    check.wait_for("master", RoundStarted)
    os.kill(check.agent("local3"), signal.SIGKILL)

    done, nodes = check.end()

    assert done.code in HONEST
    not_faulty(nodes)
    (lost,) = check.records("master", AgentsLost)
    assert (lost.nodes, lost.reason) == (["local3"], "its agent ended: killed by SIGKILL")
    assert check.records("master", AgentsLaunched)[-1].nodes == ["local3"]
    assert "local3" in done.stderr


@pytest.mark.heavy
def test_a_master_that_is_killed_takes_everything_with_it(check: Check) -> None:
    check.wait_for("master", RoundStarted)
    below = descendants(check.process.pid)
    assert len(below) == 2 * len(NODES)

    check.process.kill()

    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")


def test_with_an_interpreter_without_torch_light_probes_measure(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    python.chmod(0o755)

    done = slurm_health(
        "check", "--local=2", f"--python={python}", f"--journal={tmp_path}", "--json"
    )

    assert done.code in HONEST
    run = json.loads(done.stdout)
    assert "faulty" not in {node["level"] for node in run["nodes"]}
    told = [file.read_text() for file in tmp_path.rglob("local?.jsonl")]
    assert ['"measured"' in each for each in told] == [True, True]
    assert "has no torch): processors, memory and the network" in run["unseen"]


@pytest.mark.root
def test_a_journal_that_fills_up_ends_the_check_with_a_word_of_it(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(full)], check=True, timeout=10
    )
    try:
        done = slurm_health(
            "check",
            "--local=4",
            f"--journal={full}",
            f"--python={FAKE_WORKER}",
            environ={"FAKE_WORKER_DIR": str(tmp_path)},
        )
    finally:
        subprocess.run(["umount", str(full)], check=True, timeout=10)

    assert done.code == 4
    assert "No space left on device" in done.stderr
    assert "--journal DIR" in done.stderr


def _table(text: str) -> list[str]:
    """Return the lines of a table that name nodes."""
    return [line for line in text.splitlines() if line.startswith("local")][1:]


def _plays(pid: int, node: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"agent" in words and f"--node={node}".encode() in words


def _until(condition: Callable[[], bool]) -> None:
    """Poll something that takes as long as a check."""
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
