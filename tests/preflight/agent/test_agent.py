# SPDX-License-Identifier: Apache-2.0
"""One agent as a real process; the test plays the master, a fake interpreter the workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from slurm_health.preflight import orders
from slurm_health.preflight.agent.agent import Agent, AgentSettings
from slurm_health.preflight.agent.lookout import JournalNotVisible
from slurm_health.preflight.agent.worker_process import UNKILLABLE_S
from slurm_health.preflight.agent.worker_starts import OPEN_S
from slurm_health.preflight.bell import Ringers, ring_all
from slurm_health.records.records import (
    AgentEnded,
    AgentsLaunched,
    AgentStarted,
    DevicesUnopened,
    GroupAborted,
    MasterWaits,
    NodeReported,
    Record,
    Rendezvous,
    RoundStarted,
    Sampled,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
)
from slurm_health.records.verdict import Outcome
from slurm_health.system import journal
from tests.support.frozen import FREEZER, frozen
from tests.support.journals import Clock
from tests.support.supervised import descendants, eventually, write_executable

FAKE_WORKER = Path(__file__).parents[2] / "support" / "fake_worker.py"
_R = TypeVar("_R", bound=Record)


class Stage:
    """A journal whose master is the test, and the agent of n1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self.behaviour = directory / "workers"
        self.behaviour.mkdir()
        journal.create(self.directory, ["n1"])
        self.processes: list[subprocess.Popen[bytes]] = []

    def begin(self, run_id: str = "r1") -> None:
        self._orders = orders.Writer(self.directory, run_id, ["n1", "n2", "n3"])

    def says(self, *records: Record) -> None:
        self._orders.append(*records)

    def settings(self, python: str = str(FAKE_WORKER), silence_s: float = 60.0) -> AgentSettings:
        return AgentSettings(
            node="n1",
            directory=self.directory,
            run_id="r1",
            launch=0,
            python=python,
            poll_s=0.01,
            silence_s=silence_s,
        )

    def start(
        self,
        how: str = "well",
        *,
        python: str | Path = FAKE_WORKER,
        silence_s: float = 60.0,
        poll_s: float = 0.01,
        bell: int | None = None,
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        self.behave(how)
        settings = replace(self.settings(str(python), silence_s), poll_s=poll_s)
        options = {
            "--directory": settings.directory,
            "--run-id": settings.run_id,
            "--launch": settings.launch,
            "--python": settings.python,
            "--poll-s": settings.poll_s,
            "--silence-s": settings.silence_s,
            "--node": settings.node,
        }
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "slurm_health", "agent"),
                *(f"{name}={value}" for name, value in options.items()),
            ],
            stdin=bell,
            stdout=bell,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "FAKE_WORKER_DIR": str(self.behaviour),
                "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
                "CUDA_VISIBLE_DEVICES": "",
                **environ,
            },
        )
        self.processes.append(process)
        return process

    def behave(self, how: str) -> None:
        (self.behaviour / "n1").write_text(how)

    def records(self) -> list[Record]:
        return [e.record for e in journal.read_all(self.directory, "n1") if e.record is not None]

    def hears(self, kind: type[_R], count: int = 1) -> _R:
        """Wait until the agent has written so many records of a kind; return the last."""

        def of_kind() -> list[_R]:
            return [record for record in self.records() if isinstance(record, kind)]

        eventually(lambda: len(of_kind()) >= count, f"{count} {kind.__name__}: {self.records()}")
        return of_kind()[count - 1]

    def round(self, index: int = 0, group: Sequence[str] = ("n1",), *, port: int = 4711) -> None:
        meet = Rendezvous(address="127.0.0.1", port=port)
        self.says(
            RoundStarted(round=index, groups=[list(group)], rendezvous=[meet], deadline_s=30.0)
        )

    def abort(self, index: int = 0, group: Sequence[str] = ("n1",), **more: bool) -> None:
        self.says(GroupAborted(round=index, group=list(group), reason="n2 is gone", **more))

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.records()]

    def clean_up(self) -> None:
        for process in self.processes:
            below = descendants(process.pid)
            process.kill()
            process.wait(10)
            assert process.stderr is not None
            process.stderr.close()
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.clean_up()


@pytest.fixture
def running(stage: Stage) -> Stage:
    """A stage whose agent and workers are ready."""
    stage.begin()
    stage.start()
    stage.hears(WorkersReady)
    return stage


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    assert process.stderr is not None
    code = process.wait(20)
    return code, process.stderr.read().decode()


def test_it_says_who_it_is_and_what_its_workers_have(running: Stage) -> None:
    started, ready = running.records()

    assert isinstance(started, AgentStarted)
    assert (started.node, started.launch, started.address) == ("n1", 0, "127.0.0.1")
    assert isinstance(ready, WorkersReady)
    assert (ready.store_port, ready.backend, ready.devices) == (4711, "gloo", ["cpu"])


def test_a_round_is_measured_and_reported_once(running: Stage) -> None:
    running.round()

    report = running.hears(NodeReported)

    assert (report.round, report.outcome, report.crashed) == (0, Outcome.MEASURED, False)
    sample = running.hears(Sampled)
    assert (sample.probe, sample.group, sample.iteration_ms) == ("matmul", ["n1"], [[3.0] * 3])
    assert running.kinds()[-2:] == ["Sampled", "NodeReported"]


def test_it_takes_part_in_rounds_one_after_the_other(running: Stage) -> None:
    for index in range(3):
        running.round(index)
        assert running.hears(NodeReported, index + 1).round == index


@pytest.mark.parametrize(
    ("timed_out", "outcome"), [(True, Outcome.TIMED_OUT), (False, Outcome.NOT_RUN)]
)
def test_a_wait_for_a_partner_in_vain_ends_with_the_masters_word(
    running: Stage, timed_out: bool, outcome: Outcome
) -> None:
    running.round(group=["n1", "n2"])
    running.hears(Sampled)

    running.abort(group=["n1", "n2"], timed_out=timed_out)

    report = running.hears(NodeReported)
    assert (report.outcome, report.crashed) == (outcome, False)
    assert "WorkersStarting" not in running.kinds()


def test_a_round_without_a_meeting_place_is_not_for_this_node(running: Stage) -> None:
    running.round(0, group=["n1", "n2"], port=0)
    running.round(1)

    assert running.hears(NodeReported).round == 1


def test_a_round_of_others_is_not_for_this_node(running: Stage) -> None:
    running.round(0, group=["n2", "n3"])
    running.round(1)

    assert running.hears(NodeReported).round == 1


def test_a_worker_that_dies_in_a_round_is_a_crash_and_is_replaced(running: Stage) -> None:
    running.behave("dies")
    running.round()

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed) == (Outcome.FAILED, True)
    assert report.detail == "check process died: killed by SIGKILL"
    assert running.kinds()[2:4] == ["WorkersStarting", "NodeReported"]
    running.behave("well")
    running.hears(WorkersReady, 2)
    running.round(1)
    assert running.hears(NodeReported, 2).outcome is Outcome.MEASURED


def test_a_worker_that_dies_while_it_works_with_a_partner_is_no_crash_of_this_node(
    running: Stage,
) -> None:
    running.behave("dies-with-partner")
    running.round(group=["n1", "n2"])

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed) == (Outcome.FAILED, False)
    assert report.detail == "check process died: killed by SIGABRT"


def test_a_probe_that_raises_is_a_crash_of_this_node(running: Stage) -> None:
    running.behave("raises")
    running.round()

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed) == (Outcome.FAILED, True)
    assert report.detail == "RuntimeError: out of memory"


def test_a_device_that_computes_wrongly_is_told_from_every_other_fault(running: Stage) -> None:
    running.behave("computes-wrongly")
    running.round()

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed, report.wrong_results) == (Outcome.FAILED, True, True)


def test_workers_that_wait_for_one_that_raised_are_replaced_with_it_once(stage: Stage) -> None:
    stage.begin()
    stage.start("first-raises", CUDA_VISIBLE_DEVICES="0,1")
    stage.hears(WorkersReady)
    stage.round()

    stage.hears(NodeReported)
    stage.hears(WorkersReady, 2)
    stage.behave("well")
    stage.round(1)

    assert stage.hears(NodeReported, 2).outcome is Outcome.MEASURED
    assert stage.kinds().count("WorkersStarting") == 1


def test_a_probe_that_cannot_measure_is_no_crash(running: Stage) -> None:
    running.behave("cannot")
    running.round()

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed, report.unmeasured) == (Outcome.NOT_RUN, False, True)
    assert report.detail == "matmul: another process holds the device"
    assert "WorkersStarting" not in running.kinds()


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
def test_a_worker_that_cannot_be_killed_is_given_up_and_the_agent_goes_on(running: Stage) -> None:
    (worker,) = descendants(running.processes[0].pid)
    with frozen(worker):  # as one that hangs in a driver: it does not end when it is killed
        running.round()
        running.abort()

        failed = running.hears(WorkersFailed)

        assert failed.reason == ("the check process hangs in the kernel and cannot be killed")
        assert running.hears(NodeReported).outcome is Outcome.NOT_RUN
        running.says(VerdictReached(nodes=[]))
        assert end_of(running.processes[0])[0] == 0


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
def test_a_worker_that_takes_long_to_die_is_waited_for_and_then_replaced(running: Stage) -> None:
    (worker,) = descendants(running.processes[0].pid)
    with frozen(worker):
        begun_s = time.monotonic()
        running.round()
        running.abort()
        running.hears(NodeReported)
        eventually(lambda: time.monotonic() > begun_s + 0.7 * UNKILLABLE_S, "a slow driver")

    running.hears(WorkersReady, 2)
    assert "WorkersFailed" not in running.kinds()


def test_workers_without_a_round_leave_by_themselves_when_the_run_is_over(stage: Stage) -> None:
    ready = '{"event": "ready", "store_port": 1, "torch": "2", "backend": "gloo", "device": "cpu",'
    ready += ' "model": "", "free_bytes": 1, "collective_library": "", "start_ms": 1}'
    script = f"#!/bin/sh\necho '{ready}'\ncat\nmkdir $FAKE_WORKER_DIR/left\n"
    stage.begin()
    stage.start(python=write_executable(stage.behaviour / "python", script))
    stage.hears(WorkersReady)

    stage.says(VerdictReached(nodes=[]))

    assert end_of(stage.processes[0]) == (0, "")
    assert (stage.behaviour / "left").is_dir()


def test_a_node_that_sees_fewer_gpus_than_slurm_gave_starts_no_worker(stage: Stage) -> None:
    stage.begin()
    stage.start(SLURM_GPUS_ON_NODE="4")

    reason = stage.hears(WorkersFailed).reason
    assert reason == "Slurm gave the job 4 GPUs here, none of them can be seen"


@pytest.mark.parametrize("how", ["stuck", "deaf"])
def test_a_worker_that_is_stuck_is_killed_at_the_masters_word_and_replaced(
    running: Stage, how: str
) -> None:
    running.behave(how)
    running.round()
    running.abort(timed_out=True)

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed) == (Outcome.TIMED_OUT, False)
    assert report.detail == "did not finish, and was stopped: the deadline of the round has passed"
    running.hears(WorkersReady, 2)


def test_a_worker_that_is_stopped_in_a_round_is_its_nodes_failure_before_any_deadline(
    running: Stage,
) -> None:
    (worker,) = descendants(running.processes[0].pid)
    os.kill(worker, signal.SIGSTOP)
    running.round(group=["n1", "n2"])

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed) == (Outcome.FAILED, True)
    assert report.detail == ("check process stands still: stopped by a signal for 1 s")
    running.hears(WorkersReady, 2)
    assert worker not in descendants(running.processes[0].pid)


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
def test_a_worker_that_the_kernel_holds_in_a_round_is_told_soon_and_is_no_fault_of_the_node(
    running: Stage,
) -> None:
    (worker,) = descendants(running.processes[0].pid)
    with frozen(worker):
        running.round()

        report = running.hears(NodeReported)

    assert (report.outcome, report.crashed, report.unmeasured) == (Outcome.NOT_RUN, False, True)
    assert report.detail.startswith("check process stands still: held in the kernel")
    running.hears(WorkersReady, 2)


def test_workers_that_are_stopped_as_often_as_they_start_have_failed(stage: Stage) -> None:
    script = "#!/bin/sh\nkill -STOP $$\n"
    stage.begin()
    stage.start(python=write_executable(stage.behaviour / "python", script))

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its check process stands still: stopped by a signal for 1 s"
    assert not failed.device_failed
    assert stage.kinds().count("WorkersStarting") == 1


def test_a_stopped_worker_does_not_stop_the_agent(running: Stage) -> None:
    (worker,) = descendants(running.processes[0].pid)
    os.kill(worker, signal.SIGSTOP)
    running.round()
    running.abort()

    assert running.hears(NodeReported).outcome is Outcome.NOT_RUN
    running.hears(WorkersReady, 2)
    assert worker not in descendants(running.processes[0].pid)


def test_a_worker_that_dies_between_rounds_is_replaced_without_a_report(running: Stage) -> None:
    (worker,) = descendants(running.processes[0].pid)
    os.kill(worker, signal.SIGKILL)

    running.hears(WorkersReady, 2)

    assert running.kinds()[2:] == ["WorkersStarting", "WorkersReady"]


def test_why_a_device_is_not_used_is_told_as_its_worker_says_it(stage: Stage) -> None:
    stage.begin()
    agent = stage.start("refusing")

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "device 0 (used by process 4711, python of alice): out of memory"
    assert not failed.device_failed
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def test_without_torch_the_workers_have_failed_and_the_agent_stays(stage: Stage) -> None:
    stage.begin()
    agent = stage.start("no-torch")

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its python has no torch"
    assert failed.no_torch
    assert failed.accelerators == 0
    assert not failed.device_failed
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def test_a_device_that_fails_when_it_is_tried_again_is_named_in_its_own_words(
    stage: Stage,
) -> None:
    stage.begin()
    stage.start("broken-device")

    assert stage.hears(WorkersFailed) == WorkersFailed(
        node="n1",
        launch=0,
        reason="device 3: CUDA error: uncorrectable ECC error encountered",
        device_failed=True,
        torch="2.4.0",
    )
    assert stage.kinds().count("WorkersStarting") == 1


def test_devices_that_do_not_open_are_named_once(stage: Stage) -> None:
    stage.begin()
    stage.behave("driver-hangs")
    environ = {
        **os.environ,
        "FAKE_WORKER_DIR": str(stage.behaviour),
        "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    clock = Clock(0.0)
    said_s: list[float] = []

    def passing() -> float:
        clock.now_s += 1.0
        if "DevicesUnopened" in stage.kinds():
            said_s.append(clock.now_s)
        if said_s and clock.now_s > said_s[0] + 2 * OPEN_S:
            stage.says(VerdictReached(nodes=[]))
        return clock.now_s

    Agent(stage.settings(silence_s=1e9), environ, monotonic=passing).run()

    unopened = stage.hears(DevicesUnopened)
    assert (unopened.devices, unopened.torch) == ([0, 1], "2.4.0")
    assert OPEN_S <= unopened.waited_s < OPEN_S + 10
    assert stage.kinds().count("DevicesUnopened") == 1


def test_an_interpreter_that_is_not_there_is_named(stage: Stage) -> None:
    stage.begin()
    stage.start(python="/nonexistent/python")

    assert stage.hears(WorkersFailed).reason.startswith("cannot run /nonexistent/python")


def test_it_leaves_with_its_workers_when_the_verdict_stands(running: Stage) -> None:
    agent = running.processes[0]
    below = descendants(agent.pid)

    running.says(VerdictReached(nodes=[]))

    assert end_of(agent) == (0, "")
    assert running.hears(AgentEnded).reason == "the run is over"
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def test_it_leaves_when_another_agent_took_over(running: Stage) -> None:
    running.says(AgentsLaunched(launch=1, nodes=["n2"]))
    running.says(AgentsLaunched(launch=2, nodes=["n1"]))

    assert end_of(running.processes[0]) == (0, "")
    assert running.hears(AgentEnded).reason == "another agent took over"


def test_it_leaves_a_master_that_is_silent_and_none_that_says_it_waits(stage: Stage) -> None:
    stage.begin()
    clock = Clock(0.0)

    def passing() -> float:
        clock.now_s += 5.0
        if clock.now_s % 50 == 0 and clock.now_s <= 4000:
            stage.says(MasterWaits(reason="a node that takes an hour"))
        return clock.now_s

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=passing).run()

    assert stage.hears(AgentEnded).reason == "the master has said nothing for 60 s"
    assert 4060 < clock.now_s < 4200  # it looks at the clock a few times each time round


def test_what_held_up_the_agent_itself_is_no_silence_of_the_master(stage: Stage) -> None:
    stage.begin()
    clock = Clock(0.0)

    def passing() -> float:
        clock.now_s += 1000.0 if clock.now_s == 30.0 else 5.0  # its filesystem hung
        return clock.now_s

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=passing).run()

    assert 1090 < clock.now_s < 1130


def test_workers_die_with_an_agent_that_is_killed(running: Stage) -> None:
    agent = running.processes[0]
    (worker,) = descendants(agent.pid)

    agent.kill()
    agent.wait(10)

    eventually(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")


def test_a_run_that_is_over_already_is_left_at_once(stage: Stage) -> None:
    stage.begin()
    stage.says(VerdictReached(nodes=[]))

    assert end_of(stage.start()) == (0, "")


def test_an_agent_that_hears_the_bell_looks_at_once_and_rings_when_it_has_written(
    stage: Stage,
) -> None:
    stage.begin()
    agent = stage.start("well", poll_s=50.0, bell=subprocess.PIPE)  # longer than `hears` waits
    assert agent.stdin is not None
    assert agent.stdout is not None
    stage.hears(WorkersReady)

    for index in range(2):
        stage.round(index)
        ring_all(agent.stdin.fileno())
        stage.hears(NodeReported, index + 1)
    stage.says(VerdictReached(nodes=[]))
    ring_all(agent.stdin.fileno())
    agent.wait(timeout=20)

    with agent.stdin, agent.stdout:
        rings = Ringers().rung(agent.stdout.read())
    assert set(rings) == {"n1"}
    assert len(rings) >= 4  # it is there, its workers are ready, and a report of each round


@pytest.mark.parametrize("run_id", ["of another run", None])
def test_a_journal_that_does_not_show_this_run_is_given_up_in_time(
    stage: Stage, run_id: str | None
) -> None:
    if run_id is not None:
        stage.begin(run_id)
    clock = Clock(0.0)

    def hurry() -> float:
        clock.now_s += 5.0
        return clock.now_s

    with pytest.raises(JournalNotVisible, match=r"orders\.jsonl"):
        Agent(stage.settings(), dict(os.environ), monotonic=hurry).run()

    assert stage.records() == []


def test_a_node_that_cannot_write_its_file_says_so_for_the_launcher(stage: Stage) -> None:
    stage.begin()
    journal.path_of(stage.directory, "n1").unlink()
    journal.path_of(stage.directory, "n1").mkdir()

    code, said = end_of(stage.start())

    assert code == 4
    assert said.startswith("slurm-health agent: n1: journal ")
    assert len(said.splitlines()) == 1
