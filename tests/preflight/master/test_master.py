# SPDX-License-Identifier: Apache-2.0
"""Whole checks with real processes: a master, local agents, and workers that measure nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from slurm_health.records.errors import JournalBusy
from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    Record,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.preflight.master.check_main import run
from tests.support.rows import rows
from tests.support.supervised import descendants, eventually

FAKE_WORKER = str(Path(__file__).parents[2] / "support" / "fake_worker.py")
MAIN = str(Path(__file__).with_name("check_main.py"))
NODES = ("n1", "n2", "n3", "n4")


class Machine:
    """One machine that plays four nodes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self.workers = directory / "workers"
        self.workers.mkdir()

    def behave(self, **how: str) -> None:
        for node, text in how.items():
            (self.workers / node).write_text(text)

    def start(self) -> subprocess.Popen[bytes]:
        """Run the check in a process of its own."""
        return subprocess.Popen(
            [sys.executable, MAIN, str(self.directory), FAKE_WORKER, *NODES],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )

    def records(self) -> list[Record]:
        entries = journal.read_all(self.directory, journal.MASTER)
        return [entry.record for entry in entries if entry.record is not None]

    def of_kind(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records() if isinstance(record, kind)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setenv("FAKE_WORKER_DIR", str(machine.workers))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return machine


def levels(verdict: VerdictReached) -> dict[str, Level]:
    return {node.node: node.level for node in verdict.nodes}


def check(machine: Machine) -> VerdictReached:
    return run(machine.directory, FAKE_WORKER, NODES)


@rows
def test_the_bad_node_is_named_and_its_partners_are_well(
    machine: Machine, how: str, level: Level, said: str
) -> None:
    machine.behave(n3=how)

    verdict = check(machine)

    assert levels(verdict) == {**dict.fromkeys(NODES, Level.HEALTHY), "n3": level}
    assert said in next(node.reason for node in verdict.nodes if node.node == "n3")


def test_without_any_usable_interpreter_light_probes_measure_and_nobody_is_to_blame(
    machine: Machine,
) -> None:
    verdict = run(machine.directory, "/nonexistent/python", NODES)

    assert Level.FAULTY not in levels(verdict).values()
    assert "cannot run /nonexistent/python: No such file or directory" in verdict.unseen
    launched = [
        (bool(each.light), each.nodes)
        for each in machine.of_kind(AgentsLaunched)
        if isinstance(each, AgentsLaunched)
    ]
    assert launched == [(False, list(NODES)), (True, list(NODES))]


@pytest.mark.heavy
def test_an_agent_that_is_killed_in_a_round_is_started_again_and_named(machine: Machine) -> None:
    machine.behave(n2="stuck")  # the round is not over before the agent is killed
    process = machine.start()
    eventually(lambda: machine.of_kind(RoundStarted), "the first round")
    played = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)}
    victim = next(pid for pid, words in played.items() if b"\0--node=n2\0" in words)
    os.kill(victim, signal.SIGKILL)

    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr.decode()
    found = json.loads(stdout)
    (lost,) = machine.of_kind(AgentsLost)
    assert lost == AgentsLost(launch=0, nodes=["n2"], reason="its agent ended: killed by SIGKILL")
    assert AgentsLaunched(launch=1, nodes=["n2"]) in machine.records()
    assert {found[node] for node in ("n1", "n3", "n4")} == {"healthy"}


def test_a_run_that_is_over_is_not_run_again(machine: Machine) -> None:
    verdict = check(machine)
    assert levels(verdict) == dict.fromkeys(NODES, Level.HEALTHY)
    before = machine.records()

    assert check(machine) == verdict

    assert machine.records() == before


def test_a_second_master_of_the_same_run_is_refused(machine: Machine) -> None:
    journal.create(machine.directory, [journal.MASTER])
    with FileLock(machine.directory / "master.lock"), pytest.raises(JournalBusy):
        check(machine)
