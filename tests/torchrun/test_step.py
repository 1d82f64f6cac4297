# SPDX-License-Identifier: Apache-2.0
"""Taking part in a check that the first process runs: all that counts stands in the step's file."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_health.preflight.master.master import SILENCE_S
from slurm_health.records.errors import ChannelError, JournalError
from slurm_health.records.records import (
    AgentEnded,
    AgentsLaunched,
    MasterStopped,
    MasterWaits,
    Record,
)
from slurm_health.records.script_records import TrainingPlanned, WorkersEnded
from slurm_health.system import journal
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.check import directory_of
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import (
    BEGIN_S,
    STEP,
    Begun,
    Follower,
    Leader,
    OwnAgent,
)
from tests.support.journals import run_started

NODES = ("n1", "n2")
STARTED = run_started(NODES, run_id="7.0.0", job_id=7, user="alice")


def go(*nodes: str) -> TrainingPlanned:
    """What is written when these nodes train."""
    left_out = {node: "faulty, dead" for node in NODES if node not in nodes}
    addresses = {nodes[0]: "10.0.0.2"} if nodes else {}
    return TrainingPlanned(plan="start", nodes=list(nodes), left_out=left_out, addresses=addresses)


def place(*, start: str = "7.0.0", meets: bool = False) -> TaskPlace:
    at = NodeZeroAddress(host="h", port=1) if meets else None
    return TaskPlace(nodes=NODES, node="n2", start=start, job_id=7, cluster="lab", meeting=at)


def agent(program: str = "pass") -> OwnAgent:
    """An agent whose program is these lines of Python; they may use `launch`."""

    def command(launch: int, _node: str | None) -> list[str]:
        return [sys.executable, "-c", f"launch = {launch}\n{program}"]

    return OwnAgent("n2", command, {})


def take_part(
    directory: Path, own: OwnAgent, *turns: Callable[[journal.Writer], bool]
) -> TrainingPlanned:
    """Follow a first process that takes these turns, each once it has come true that it can."""
    journal.create(directory, [STEP])
    step = journal.Writer(directory, STEP, lambda: 0.0)
    left: Iterator[Callable[[journal.Writer], bool]] = iter(turns)
    current = [next(left)]

    def sleep(_seconds: float) -> None:
        if current[0](step):
            current[0] = next(left, lambda _: False)

    return Follower(place(), directory, sleep=sleep).check(own)


def writes(*records: Record) -> Callable[[journal.Writer], bool]:
    def turn(step: journal.Writer) -> bool:
        step.append(*records)
        return True

    return turn


def ends_of(directory: Path) -> list[AgentEnded]:
    entries = journal.read_all(directory, "n2")
    return [entry.record for entry in entries if isinstance(entry.record, AgentEnded)]


def test_the_end_of_an_agent_is_written_for_it_and_the_next_one_is_started(tmp_path: Path) -> None:
    dies = "import sys; sys.exit('out of luck' if launch == 0 else 0)"
    take_part(
        tmp_path,
        agent(dies),
        writes(AgentsLaunched(launch=0, nodes=list(NODES))),
        lambda _: len(ends_of(tmp_path)) == 1,
        writes(AgentsLaunched(launch=1, nodes=["n2"])),
        lambda _: len(ends_of(tmp_path)) == 2,
        writes(go("n2")),
    )
    first, second = ends_of(tmp_path)
    assert (first.launch, first.reason) == (0, "its agent ended: exit code 1: out of luck")
    assert (second.launch, second.reason) == (1, "its agent ended: exit code 0")


@pytest.mark.parametrize(("begun", "after_s"), [(False, BEGIN_S), (True, SILENCE_S)])
def test_a_first_process_that_writes_nothing_is_named_after_a_while(
    tmp_path: Path, begun: bool, after_s: float
) -> None:
    journal.create(tmp_path, [STEP])
    if begun:
        journal.Writer(tmp_path, STEP, lambda: 0.0).append(MasterWaits(reason=""))
    waited_s = [0.0]

    def sleep(seconds: float) -> None:
        waited_s[0] += seconds

    with pytest.raises(JournalError, match="n1, which runs the check"):
        Follower(place(), tmp_path, sleep=sleep).check(agent())
    assert after_s < waited_s[0] <= after_s + 2


def test_the_others_know_at_once_that_the_first_process_was_interrupted(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="n1: the run was ended: it was ended by SIGINT"):
        take_part(tmp_path, agent(), writes(MasterStopped(reason="SIGINT")))


def test_a_node_that_comes_late_knows_that_the_training_has_begun(tmp_path: Path) -> None:
    journal.create(tmp_path, [STEP])
    journal.Writer(tmp_path, STEP, lambda: 0.0).append(go("n1"))
    with pytest.raises(Begun) as late:
        Follower(place(meets=True), tmp_path).check(agent())
    assert late.value.planned.addresses == {"n1": "10.0.0.2"}


def test_all_processes_of_a_start_have_the_same_directory(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, place(), checks=True)
    assert directory == tmp_path / "lab" / "7" / "0-2"
    journal.create(directory, [journal.MASTER])
    assert directory_of(tmp_path, place(), checks=True) == directory
    journal.Writer(directory, journal.MASTER, lambda: 0.0).append(STARTED)
    assert directory_of(tmp_path, place(), checks=True) == directory
    # A job whose id was given out before has one of its own.
    again = place(start="7.0.0.99")
    assert directory_of(tmp_path, again, checks=True) == directory.with_name("0-1002")
    # A start without a check is no run of the job.
    unchecked = directory_of(tmp_path, place(), checks=False)
    journal.create(unchecked, [STEP])
    assert journal.runs_of(tmp_path, "lab", "7") == [directory]


KILLED = WorkersEnded(node="n2", exit_code=1, output="killed")


def test_the_first_process_decides_by_all_reports_what_all_do(tmp_path: Path) -> None:
    leader = Leader(replace(place(), node="n1"), NODES, tmp_path)
    follower = Follower(place(), tmp_path)
    assert not leader.workers_ended()
    journal.Writer(tmp_path, "n2", lambda: 0.0).append(KILLED)
    assert leader.workers_ended()
    own = WorkersEnded(node="n1", exit_code=1, output="reset")

    def decide(reports: list[WorkersEnded], silent: int) -> TrainingPlanned:
        assert ([report.node for report in reports], silent) == (["n2", "n1"], 0)
        return TrainingPlanned(plan="check", nodes=["n1"])

    plan = leader.follow_up(own, NODES, decide)
    assert follower.workers_ended()
    assert follower.follow_up(KILLED) == plan


@pytest.mark.parametrize("looks_for_the_cause", [False, True])
def test_a_first_process_is_lost_after_seconds_or_a_minute_if_it_looks_for_the_cause(
    tmp_path: Path, looks_for_the_cause: bool
) -> None:
    waited_s = [0.0]

    def sleep(seconds: float) -> None:
        waited_s[0] += seconds
        if waited_s[0] == seconds:  # a sign of life: the wait begins anew
            leader.show_life()

    leader = Leader(replace(place(), node="n1"), NODES, tmp_path)
    if looks_for_the_cause:
        leader.step.append(WorkersEnded(node="n1", exit_code=1))
    lost = Follower(place(), tmp_path, sleep=sleep)
    assert lost.follow_up(KILLED) is None
    least_s = SILENCE_S if looks_for_the_cause else 8.0
    assert least_s < waited_s[0] < 1.5 * least_s
    leader.finish()
    assert Follower(place(), tmp_path).follow_up(KILLED) == TrainingPlanned(plan="stop")


def test_a_node_whose_workers_end_slowly_is_waited_for_and_one_without_a_sign_of_life_is_not(
    tmp_path: Path,
) -> None:
    waited_s = [0.0]

    def sleep(seconds: float) -> None:
        waited_s[0] += seconds
        if waited_s[0] < 30.0:
            slow.show_life()
        elif slow_ended:
            journal.Writer(tmp_path, "n2", lambda: 0.0).append(slow_ended.pop())

    slow_ended = [KILLED]
    three = replace(place(), nodes=("n1", "n2", "n3"))
    leader = Leader(replace(three, node="n1"), three.nodes, tmp_path, sleep=sleep)
    slow = Follower(three, tmp_path)

    def decide(reports: list[WorkersEnded], silent: int) -> TrainingPlanned:
        assert ([report.node for report in reports], silent) == (["n1", "n2"], 1)
        return TrainingPlanned(plan="check", nodes=["n1", "n2"])

    leader.follow_up(WorkersEnded(node="n1", exit_code=1), three.nodes, decide)
    assert 30.0 <= waited_s[0] < 31.0
