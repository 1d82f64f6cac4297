# SPDX-License-Identifier: Apache-2.0
"""Whole checks with real processes: a master, local agents, and workers that measure nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from slurm_health.preflight.master.master import (
    HEARTBEAT_S,
    SHORTEST_POLL_S,
    SHORTEST_SWEEP_S,
    SILENCE_S,
    Master,
    MasterSettings,
    poll_interval_s,
)
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.deadlines import Limits
from slurm_health.records.errors import JournalBusy, JournalError
from slurm_health.records.records import (
    AgentsLaunched,
    AgentsLost,
    AgentStarted,
    Disposition,
    MasterResumed,
    NodesAdmitted,
    Record,
    RoundEnded,
    RoundStarted,
    RunFinished,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from tests.support.check_main import QUICK, run, started
from tests.support.journals import Clock
from tests.support.session_story import ready
from tests.support.supervised import descendants, eventually

FAKE_WORKER = str(Path(__file__).parents[2] / "support" / "fake_worker.py")
MAIN = str(Path(__file__).parents[2] / "support" / "check_main.py")
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


def all_but(node: str, level: Level) -> dict[str, Level]:
    return {name: level if name == node else Level.HEALTHY for name in NODES}


def judged(verdict: VerdictReached, node: str) -> NodeVerdict:
    return next(each for each in verdict.nodes if each.node == node)


def check(machine: Machine) -> VerdictReached:
    return run(machine.directory, FAKE_WORKER, NODES)


def finish(process: subprocess.Popen[bytes]) -> dict[str, str]:
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr.decode()
    answer: dict[str, str] = json.loads(stdout)
    return answer


def test_nodes_that_are_all_well_are_found_to_be_well(machine: Machine) -> None:
    assert levels(check(machine)) == dict.fromkeys(NODES, Level.HEALTHY)


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_the_node_whose_processes_fail_is_faulty_and_its_partners_are_not(
    machine: Machine, how: str
) -> None:
    machine.behave(n3=how)

    assert levels(check(machine)) == all_but("n3", Level.FAULTY)


def test_the_node_that_hangs_is_faulty_and_its_partners_are_not(machine: Machine) -> None:
    machine.behave(n3="stuck")

    assert levels(check(machine)) == all_but("n3", Level.FAULTY)


def test_a_slow_node_is_slow(machine: Machine) -> None:
    machine.behave(n2="slow")

    verdict = check(machine)

    assert levels(verdict) == all_but("n2", Level.SLOW)
    assert judged(verdict, "n2").component == "compute"


def test_a_node_whose_torch_is_broken_is_undecided_with_the_interpreters_words(
    machine: Machine,
) -> None:
    machine.behave(n4="broken-torch")

    verdict = check(machine)

    assert levels(verdict) == all_but("n4", Level.INCONCLUSIVE)
    assert "libtorch_cpu.so" in judged(verdict, "n4").reason


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


def test_an_agent_that_is_killed_in_a_round_is_started_again_and_named(machine: Machine) -> None:
    machine.behave(n2="stuck")  # the round is not over before the agent is killed
    process = machine.start()
    eventually(lambda: machine.of_kind(RoundStarted), "the first round")
    victim = next(pid for pid in descendants(process.pid) if _plays(pid, "n2"))
    os.kill(victim, signal.SIGKILL)

    found = finish(process)

    (lost,) = machine.of_kind(AgentsLost)
    assert lost == AgentsLost(launch=0, nodes=["n2"], reason="its agent ended: killed by SIGKILL")
    assert AgentsLaunched(launch=1, nodes=["n2"]) in machine.records()
    assert {found[node] for node in ("n1", "n3", "n4")} == {"healthy"}


def test_a_master_that_is_killed_in_a_round_is_gone_on_for_by_the_next(machine: Machine) -> None:
    machine.behave(n3="stuck")
    first = machine.start()
    eventually(lambda: machine.of_kind(RoundStarted), "the first round")
    below = descendants(first.pid)
    first.kill()
    first.communicate()
    eventually(lambda: not [p for p in below if Path(f"/proc/{p}").exists()], "the agents' end")

    found = finish(machine.start())

    assert found == {**dict.fromkeys(NODES, "healthy"), "n3": "faulty"}
    assert len(machine.of_kind(RunStarted)) == len(machine.of_kind(MasterResumed)) == 1
    assert RoundEnded(round=0, void=True) in machine.records()
    rounds = [r.round for r in machine.records() if isinstance(r, RoundStarted)]
    assert rounds == list(range(len(rounds)))


def test_a_run_that_is_over_is_not_run_again(machine: Machine) -> None:
    verdict = check(machine)
    before = machine.records()

    assert check(machine) == verdict

    assert machine.records() == before


def test_a_second_master_of_the_same_run_is_refused(machine: Machine) -> None:
    journal.create(machine.directory, [journal.MASTER])
    with FileLock(machine.directory / "master.lock"), pytest.raises(JournalBusy):
        check(machine)


class IdleLauncher:
    """Starts nothing and says so."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self.started: list[tuple[int, tuple[str, ...]]] = []
        self.stopped = False

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        self.started.append((launch, tuple(nodes)))

    def poll(self) -> list[AgentsLost]:
        return []

    def ring(self) -> None:
        pass

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:  # noqa: ARG002 - nobody rings
        self._sleep(timeout_s)
        return set()

    def stop(self, grace_s: float = 0.0) -> None:  # noqa: ARG002 - a launcher's signature
        self.stopped = True


def test_a_check_in_which_nothing_ever_starts_ends_by_the_clock_alone(tmp_path: Path) -> None:
    clock = Clock(1000.0)

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock.now_s += max(seconds, 0.5)

    launcher = IdleLauncher(sleep)

    master = Master(
        tmp_path / "run",
        NODES,
        launcher,
        MasterSettings(limits=Limits(), phases=QUICK, make_localizer=make_localizer),
        clock=clock,
    )
    began = time.monotonic()
    master.open(started(NODES))
    verdict = master.run()
    master.close()

    assert levels(verdict) == dict.fromkeys(NODES, Level.INCONCLUSIVE)
    assert launcher.started == [(0, NODES)]
    assert launcher.stopped
    assert clock.now_s < 1000.0 + 2 * Limits().start_s
    assert time.monotonic() - began < 60


def test_a_master_that_waits_says_so_long_before_anybody_takes_it_for_dead(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    turns_s: list[float] = []
    steps_s = iter([*[0.5] * 40, -25.0])  # then it is set back

    def sleep(_seconds: float) -> None:
        clock.now_s += next(steps_s, 0.5)

    master = Master(
        tmp_path / "run",
        NODES,
        IdleLauncher(sleep),
        MasterSettings(
            limits=Limits(),
            phases=QUICK,
            make_localizer=make_localizer,
            alive=lambda: turns_s.append(clock.now_s),
        ),
        clock=clock,
    )
    master.open(started(NODES))
    master.run()
    master.close()

    times_s = [entry.time_s for entry in journal.read_all(tmp_path / "run", journal.MASTER)]
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert max(map(abs, gaps_s)) <= 2.5 * HEARTBEAT_S
    assert sum(gap == HEARTBEAT_S for gap in gaps_s) > 5
    assert 5 * HEARTBEAT_S < SILENCE_S
    # Its supervisor hears of every turn, so that only a master that hangs is silent.
    assert max(after - before for before, after in itertools.pairwise(turns_s)) == 0.5


class LosingLauncher(IdleLauncher):
    """Has agents that write what they should; only their first rings arrive."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._writers = {node: journal.Writer(directory, node, clock) for node in NODES}
        self._waits = 0

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        super().start(launch, nodes)
        for node in nodes:
            here = AgentStarted(node=node, launch=launch, hostname=node, address="10.0.0.1")
            self._writers[node].append(here)

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:  # noqa: ARG002 - none is waited
        self._waits += 1
        if self._waits == 1:
            return set(NODES)
        if self._waits == 2:
            for node in NODES:
                self._writers[node].append(ready(node))
        self._clock.now_s += READY_S + 0.5
        return set()


READY_S = 3.0


def test_nodes_whose_rings_are_lost_are_read_before_they_count_as_silent(tmp_path: Path) -> None:
    assert READY_S + 0.5 < SHORTEST_SWEEP_S
    clock = Clock(1000.0)
    run = tmp_path / "run"
    journal.create(run, NODES)
    master = Master(
        run,
        NODES,
        LosingLauncher(run, clock),
        MasterSettings(
            limits=Limits(ready_s=READY_S),
            phases=QUICK,
            make_localizer=make_localizer,
        ),
        clock=clock,
    )
    master.open(started(NODES))
    master.run()
    master.close()

    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    assert [each.nodes for each in records if isinstance(each, NodesAdmitted)] == [list(NODES)]


def test_how_a_run_ends_is_written_once_and_again_only_when_it_changes(tmp_path: Path) -> None:
    master = Master(
        tmp_path / "run",
        NODES,
        IdleLauncher(),
        MasterSettings(limits=Limits(), phases=QUICK, make_localizer=make_localizer),
    )
    master.open(started(NODES))
    requeue = RunFinished(disposition=Disposition.REQUEUE, exit_code=1)
    stop = RunFinished(disposition=Disposition.STOP, exit_code=1)

    for finished in (requeue, requeue, stop, stop):
        master.finish(finished)
    master.close()

    entries = journal.read_all(tmp_path / "run", journal.MASTER)
    assert [e.record for e in entries if isinstance(e.record, RunFinished)] == [requeue, stop]


def test_a_master_that_was_not_opened_records_nothing(tmp_path: Path) -> None:
    master = Master(
        tmp_path / "run",
        NODES,
        IdleLauncher(),
        MasterSettings(limits=Limits(), phases=QUICK, make_localizer=make_localizer),
    )

    with pytest.raises(JournalError, match="not open"):
        master.finish(RunFinished(disposition=Disposition.STOP, exit_code=1))


@pytest.mark.parametrize("nodes", [1, 4, 64, 1024, 4096])
def test_the_load_on_the_filesystem_is_bounded_whatever_the_size_of_the_run(nodes: int) -> None:
    interval_s = poll_interval_s(nodes)

    assert interval_s >= SHORTEST_POLL_S
    assert 2 * nodes / interval_s <= 2001


def _plays(pid: int, node: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"agent" in words and f"--node={node}".encode() in words
