# SPDX-License-Identifier: Apache-2.0
"""One agent, from its first word to its last: workers that get ready, rounds, its end."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.agent.agent import Agent
from slurm_health.preflight.agent.order_poller import JournalNotVisible
from slurm_health.preflight.agent.workers import OPEN_S
from slurm_health.preflight.orders import Ringers, ring_all
from slurm_health.records.records import (
    AgentEnded,
    AgentsLaunched,
    AgentStarted,
    DevicesUnopened,
    MasterWaits,
    NodeReported,
    ProbeUsed,
    Sampled,
    VerdictReached,
    WorkersFailed,
    WorkersReady,
    WorkersStarting,
)
from slurm_health.records.verdict import Outcome
from slurm_health.system import journal
from tests.preflight.agent.agent_stage import Stage, end_of
from tests.preflight.agent.frozen import FREEZER, frozen
from tests.support.journals import Clock
from tests.support.rows import rows
from tests.support.supervised import descendants, eventually, write_executable


def test_a_round_is_measured_and_reported_once(running: Stage) -> None:
    started, ready = running.records()
    assert isinstance(started, AgentStarted)
    assert (started.node, started.launch, started.address) == ("n1", 0, "127.0.0.1")
    assert isinstance(ready, WorkersReady)
    assert (ready.store_port, ready.backend, ready.devices) == (4711, "gloo", ["cpu"])

    running.round()

    report = running.hears(NodeReported)
    assert (report.round, report.outcome, report.crashed) == (0, Outcome.MEASURED, False)
    sample = running.hears(Sampled)
    assert (sample.probe, sample.group, sample.iteration_ms) == ("matmul", ["n1"], [[3.0] * 3])
    assert running.kinds()[-2:] == ["Sampled", "NodeReported"]


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


def test_a_round_of_others_or_without_a_meeting_place_is_not_for_this_node(
    running: Stage,
) -> None:
    running.round(0, group=["n2", "n3"])
    running.round(1, group=["n1", "n2"], port=0)
    running.round(2)

    assert running.hears(NodeReported).round == 2


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


@rows
def test_what_fails_in_a_round_is_this_nodes_fault_only_where_no_other_can_be_its_cause(
    running: Stage, how: str, outcome: Outcome, flags: tuple[bool, bool, bool], detail: str
) -> None:
    running.behave(how)
    running.round(group=["n1", "n2"] if how == "dies-with-partner" else ["n1"])

    report = running.hears(NodeReported)

    assert report.outcome is outcome
    assert (report.crashed, report.wrong_results, report.unmeasured) == flags
    assert report.detail.endswith(detail)
    assert how != "cannot" or "WorkersStarting" not in running.kinds()


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


def test_a_program_that_this_node_was_not_started_with_is_not_run(stage: Stage) -> None:
    stage.begin()
    stage.says(AgentsLaunched(launch=0, nodes=["n1"]))
    stage.start(programs=["/opt/own.py"])
    stage.hears(WorkersReady)

    stage.round(0, probes=[ProbeUsed(name="own", scope="solo", path="/tmp/other")])
    refused = stage.hears(NodeReported)
    stage.round(1, probes=[ProbeUsed(name="own", scope="solo", path="/opt/own.py")])

    assert (refused.outcome, refused.unmeasured) == (Outcome.NOT_RUN, True)
    assert refused.detail.startswith("node 0 asks for /tmp/other, which --check of this node")
    assert stage.hears(NodeReported, 2).outcome is Outcome.MEASURED


@pytest.mark.heavy
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


def test_a_round_that_the_master_began_as_a_worker_died_is_said_not_to_have_begun(
    running: Stage,
) -> None:
    running.behave("never-ready")
    (worker,) = descendants(running.processes[0].pid)
    os.kill(worker, signal.SIGKILL)
    running.hears(WorkersStarting)
    running.round()

    report = running.hears(NodeReported)

    assert (report.outcome, report.crashed, report.unmeasured) == (Outcome.NOT_RUN, False, True)
    assert report.detail == "a check process died before the round began: killed by SIGKILL"
    assert "WorkersFailed" not in running.kinds()


def test_it_leaves_when_another_agent_took_over(running: Stage) -> None:
    running.says(AgentsLaunched(launch=1, nodes=["n2"]))
    running.says(AgentsLaunched(launch=2, nodes=["n1"]))

    assert end_of(running.processes[0]) == (0, "")
    assert running.hears(AgentEnded).reason == "another agent took over"


def test_workers_die_with_an_agent_that_is_killed(running: Stage) -> None:
    agent = running.processes[0]
    (worker,) = descendants(agent.pid)

    agent.kill()
    agent.wait(10)

    eventually(lambda: not Path(f"/proc/{worker}").exists(), "the worker's end")


def test_a_node_that_cannot_write_its_file_says_so_for_the_launcher(stage: Stage) -> None:
    stage.begin()
    journal.path_of(stage.directory, "n1").unlink()
    journal.path_of(stage.directory, "n1").mkdir()

    code, said = end_of(stage.start())

    assert code == 4
    assert said.startswith("slurm-health agent: n1: journal ")
    assert len(said.splitlines()) == 1


def test_workers_that_are_stopped_as_often_as_they_start_have_failed(stage: Stage) -> None:
    script = "#!/bin/sh\nkill -STOP $$\n"
    stage.begin()
    stage.start(python=write_executable(stage.behaviour / "python", script))

    failed = stage.hears(WorkersFailed)

    assert failed.reason == "its check process stands still: stopped by a signal for 1 s"
    assert not failed.device_failed
    assert stage.kinds().count("WorkersStarting") == 1


@rows
def test_why_the_workers_of_a_node_do_not_get_ready_is_told_and_the_agent_stays(
    stage: Stage, how: str, environ: dict[str, Any], failed: dict[str, Any], starting: int
) -> None:
    stage.begin()
    agent = stage.start(how, **environ)

    assert stage.hears(WorkersFailed) == WorkersFailed(node="n1", launch=0, **failed)
    assert stage.kinds().count("WorkersStarting") == starting
    stage.says(VerdictReached(nodes=[]))
    assert end_of(agent) == (0, "")


def hurrying(
    step_s: float, look: Callable[[float], float | None] = lambda _: None
) -> Callable[[], float]:
    """Return a clock that goes on each time that it is read: a step, and what `look` returns."""
    clock = Clock(0.0)

    def passing() -> float:
        clock.now_s += step_s
        clock.now_s += look(clock.now_s) or 0.0
        return clock.now_s

    return passing


def test_devices_that_do_not_open_are_named_once(stage: Stage) -> None:
    stage.begin()
    stage.behave("driver-hangs")
    said_s: list[float] = []

    def look(now_s: float) -> None:
        if "DevicesUnopened" in stage.kinds():
            said_s.append(now_s)
        if said_s and now_s > said_s[0] + 2 * OPEN_S:
            stage.says(VerdictReached(nodes=[]))

    environ = {
        **os.environ,
        "FAKE_WORKER_DIR": str(stage.behaviour),
        "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    Agent(stage.settings(silence_s=1e9), environ, monotonic=hurrying(1.0, look)).run()

    unopened = stage.hears(DevicesUnopened)
    assert (unopened.devices, unopened.torch) == ([0, 1], "2.4.0")
    assert OPEN_S <= unopened.waited_s < OPEN_S + 10
    assert stage.kinds().count("DevicesUnopened") == 1


def test_it_leaves_a_master_that_is_silent_and_none_that_says_it_waits(stage: Stage) -> None:
    stage.begin()
    times_s = [0.0]

    def wait(now_s: float) -> None:
        times_s.append(now_s)
        if now_s % 50 == 0 and now_s <= 4000:
            stage.says(MasterWaits(reason="a node that takes an hour"))

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=hurrying(5.0, wait)).run()

    assert stage.hears(AgentEnded).reason == "the master has been silent for 60 s"
    assert 4060 < times_s[-1] < 4200  # it looks at the clock a few times each time round


def test_what_held_up_the_agent_itself_is_no_silence_of_the_master(stage: Stage) -> None:
    stage.begin()
    times_s = [0.0]

    def hang(now_s: float) -> float:  # of its filesystem
        times_s.append(now_s)
        return 1000.0 if now_s == 30.0 else 0.0

    Agent(stage.settings("/nonexistent"), dict(os.environ), monotonic=hurrying(5.0, hang)).run()

    assert 1090 < times_s[-1] < 1150


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
    assert {news.node for news in rings} == {"n1"}
    rung = b"".join(news.data for news in rings)
    assert journal.path_of(stage.directory, "n1").read_bytes().startswith(rung)
    assert rung.count(b'"node_reported"') == 2


@pytest.mark.parametrize("run_id", ["of another run", None])
def test_a_journal_that_does_not_show_this_run_is_given_up_in_time(
    stage: Stage, run_id: str | None
) -> None:
    if run_id is not None:
        stage.begin(run_id)

    with pytest.raises(JournalNotVisible, match=r"orders\.txt"):
        Agent(stage.settings(), dict(os.environ), monotonic=hurrying(5.0)).run()

    assert stage.records() == []
