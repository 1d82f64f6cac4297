# SPDX-License-Identifier: Apache-2.0
"""Taking part in a check that the first process runs: all that counts stands in the step's file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.master.master import SILENCE_S
from slurm_health.records.errors import ChannelError, JournalError
from slurm_health.records.records import (
    Action,
    ActionIntended,
    AgentEnded,
    AgentsLaunched,
    AgentStarted,
    Disposition,
    JobOutcome,
    MasterStopped,
    MasterWaits,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.torchrun.place import TaskPlace
from slurm_health.torchrun.step import BEGIN_S, STEP, OwnAgent, Start, directory_of, follow
from tests.support.supervised import eventually

NODES = ("n1", "n2")
STARTED = RunStarted(
    run_id="7.0.0",
    job_id=7,
    attempt=0,
    cluster="lab",
    partition="main",
    nodes=list(NODES),
    master_node="n1",
    user="alice",
)
REASON = "without n1"
STOP = JobOutcome(disposition=Disposition.STOP, exit_code=1, reason="n1 is faulty")


def go(*nodes: str) -> tuple[Record, ...]:
    """What is written when these nodes train."""
    left = [
        NodeVerdict(node=node, level=Level.FAULTY, reason="dead")
        for node in NODES
        if node not in nodes
    ]
    address = AgentStarted(node=nodes[0], launch=0, hostname="h", address="10.0.0.2")
    return (
        address,
        VerdictReached(nodes=left),
        ActionIntended(action=Action.PROCEED, nodes=list(nodes), reason=REASON),
        JobOutcome(disposition=Disposition.PROCEED, exit_code=0, reason=REASON),
    )


def place(*, chosen_start: bool = False, start: str = "7.0.0") -> TaskPlace:
    return TaskPlace(
        nodes=NODES, node="n2", start=start, job_id=7, cluster="lab", chosen_start=chosen_start
    )


def agent(program: str = "pass") -> OwnAgent:
    """An agent whose program is these lines of Python; they may use `launch`."""

    def command(launch: int, _node: str | None) -> list[str]:
        return [sys.executable, "-c", f"launch = {launch}\n{program}"]

    return OwnAgent("n2", command, {})


def take_part(directory: Path, own: OwnAgent, *turns: Callable[[journal.Writer], bool]) -> Start:
    """Follow a first process that takes these turns, each once it has come true that it can."""
    journal.create(directory, [STEP])
    step = journal.Writer(directory, STEP, lambda: 0.0)
    left: Iterator[Callable[[journal.Writer], bool]] = iter(turns)
    current = [next(left)]

    def sleep(_seconds: float) -> None:
        if current[0](step):
            current[0] = next(left, lambda _: False)

    return follow(directory, place(), own, monotonic=lambda: 0.0, sleep=sleep)


def writes(*records: Record) -> Callable[[journal.Writer], bool]:
    def turn(step: journal.Writer) -> bool:
        step.append(*records)
        return True

    return turn


def ends_of(directory: Path) -> list[AgentEnded]:
    entries = journal.read_all(directory, "n2")
    return [entry.record for entry in entries if isinstance(entry.record, AgentEnded)]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (go("n2"), (("n2",), {"n1": "faulty, dead"}, {"n2": "10.0.0.2"})),
        (go("n1"), (("n1",), {"n2": "faulty, dead"}, {"n1": "10.0.0.2"})),
        ((STOP,), ((), {}, {})),
    ],
    ids=["goes on", "left out", "stop"],
)
def test_all_processes_read_whom_the_first_one_lets_train(
    tmp_path: Path, outcome: tuple[Record, ...], expected: tuple[object, ...]
) -> None:
    start = take_part(tmp_path, agent(), writes(MasterWaits(reason="")), writes(*outcome))
    assert (start.nodes, start.left_out, start.addresses) == expected
    assert start.directory == tmp_path


def test_the_end_of_an_agent_is_written_for_it_and_the_next_one_is_started(tmp_path: Path) -> None:
    dies = "import sys; sys.exit('out of luck' if launch == 0 else 0)"
    take_part(
        tmp_path,
        agent(dies),
        writes(AgentsLaunched(launch=0, nodes=list(NODES))),
        lambda _: len(ends_of(tmp_path)) == 1,
        writes(AgentsLaunched(launch=1, nodes=["n2"])),
        lambda _: len(ends_of(tmp_path)) == 2,
        writes(*go("n2")),
    )
    first, second = ends_of(tmp_path)
    assert (first.launch, first.reason) == (0, "its agent ended: exit code 1: out of luck")
    assert (second.launch, second.reason) == (1, "its agent ended: exit code 0")


def test_an_agent_is_started_for_its_own_node_and_ended_if_it_does_not_leave(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    own = agent(f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)")
    own.start(0, ["n1", "n3"])
    assert own.poll() == []
    own.start(0, ["n2"])
    eventually(ready.exists, "it runs")
    own.stop(0.0)
    assert own.poll() == []


@pytest.mark.parametrize(("begun", "after_s"), [(False, BEGIN_S), (True, SILENCE_S)])
def test_a_first_process_that_writes_nothing_is_named_after_a_while(
    tmp_path: Path, begun: bool, after_s: float
) -> None:
    journal.create(tmp_path, [STEP])
    if begun:
        journal.Writer(tmp_path, STEP, lambda: 0.0).append(MasterWaits(reason=""))
    now_s = [0.0]

    def pass_time(_seconds: float) -> None:
        now_s[0] += 1.0

    with pytest.raises(JournalError, match="n1, which runs the check"):
        follow(tmp_path, place(), agent(), monotonic=lambda: now_s[0], sleep=pass_time)
    assert after_s < now_s[0] <= after_s + 2


def test_the_others_know_at_once_that_the_first_process_was_interrupted(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="n1: the run was ended: it was ended by SIGINT"):
        take_part(tmp_path, agent(), writes(MasterStopped(reason="SIGINT")))


def test_a_name_that_was_used_before_is_refused(tmp_path: Path) -> None:
    journal.create(tmp_path, [STEP])
    journal.Writer(tmp_path, STEP, lambda: 0.0).append(*go("n2"))
    with pytest.raises(JournalError, match="earlier start; give each start its own --rdzv-id"):
        follow(tmp_path, place(chosen_start=True), agent())


def test_a_late_task_learns_what_was_decided_without_it(tmp_path: Path) -> None:
    journal.create(tmp_path, [STEP])
    step = journal.Writer(tmp_path, STEP, lambda: 0.0)
    step.append(AgentsLaunched(launch=0, nodes=list(NODES)), *go("n2"))
    assert follow(tmp_path, place(), agent("raise SystemExit(9)")).nodes == ("n2",)
    assert ends_of(tmp_path) == []


def test_all_processes_of_a_start_have_the_same_directory(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, place())
    assert directory == tmp_path / "lab" / "7" / "0-2"
    journal.create(directory, [journal.MASTER])
    assert directory_of(tmp_path, place()) == directory
    journal.Writer(directory, journal.MASTER, lambda: 0.0).append(STARTED)
    assert directory_of(tmp_path, place()) == directory
    # A job whose id was given out before has one of its own.
    assert directory_of(tmp_path, place(start="7.0.0.99")) == directory.with_name("0-1002")


def test_the_command_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, slurm_health.cli.main, slurm_health.cli.drop_ins;"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
