# SPDX-License-Identifier: Apache-2.0
"""Taking part in a check that the first process runs: everything it says is in the journal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_health.preflight import orders
from slurm_health.preflight.master.master import SILENCE_S, MasterSettings
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.errors import JournalError
from slurm_health.records.records import (
    Action,
    ActionIntended,
    AgentEnded,
    AgentsLaunched,
    Disposition,
    JobOutcome,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level, NodeVerdict
from slurm_health.system import journal
from slurm_health.torchrun.joint_check import (
    BEGIN_S,
    JointOutcome,
    OwnAgent,
    directory_of,
    follow,
    lead,
)
from slurm_health.torchrun.node_choice import Bounds, NodeChoice
from slurm_health.torchrun.place import TaskPlace
from tests.support.world import QUICK

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
VERDICT = VerdictReached(
    nodes=[NodeVerdict(node="n1", level=Level.FAULTY), NodeVerdict(node="n2", level=Level.HEALTHY)]
)
REASON = "without n1"
GO = (
    VERDICT,
    ActionIntended(action=Action.PROCEED, nodes=["n2"], reason=REASON),
    JobOutcome(disposition=Disposition.PROCEED, exit_code=0, reason=REASON),
)
BOUNDS = Bounds(least=1, most=2)


def place(*, chosen_start: bool = False, start: str = "7.0.0") -> TaskPlace:
    return TaskPlace(
        nodes=NODES, node="n2", start=start, job_id=7, cluster="lab", chosen_start=chosen_start
    )


def agent(program: str = "pass") -> OwnAgent:
    """An agent whose program is these lines of Python; they may use `launch`."""

    def command(launch: int, _node: str | None) -> list[str]:
        return [sys.executable, "-c", f"launch = {launch}\n{program}"]

    return OwnAgent("n2", command, {})


class Master:
    """The first process: says its next word whenever the other one would wait."""

    def __init__(self, directory: Path, words: Iterator[Callable[[], bool]]) -> None:
        self._writer = journal.Writer(directory, journal.MASTER, lambda: 0.0)
        self._orders = orders.OrderWriter(directory, STARTED.run_id, NODES)
        self._words = words
        self._word: Callable[[], bool] | None = None

    def says(self, *records: Record) -> bool:
        self._writer.append(*records)
        self._orders.append(*records)
        return True

    def decides(self, *nodes: str) -> bool:
        self._orders.conclude(VERDICT, nodes, REASON)
        return True

    def turn(self, _seconds: float) -> None:
        self._word = self._word or next(self._words, lambda: False)
        if self._word():
            self._word = None


def take_part(directory: Path, own: OwnAgent, *words: Callable[[Master], bool]) -> JointOutcome:
    """Follow a master that says these words, each once it has come true that it can."""
    journal.create(directory, [journal.MASTER])
    master: Master

    def bound(word: Callable[[Master], bool]) -> Callable[[], bool]:
        return lambda: word(master)

    master = Master(directory, iter([bound(word) for word in words]))
    return follow(directory, place(), own, monotonic=lambda: 0.0, sleep=master.turn)


def ends_of(directory: Path) -> list[AgentEnded]:
    entries = journal.read_all(directory, "n2")
    return [entry.record for entry in entries if isinstance(entry.record, AgentEnded)]


def test_the_outcome_is_what_the_first_process_decides(tmp_path: Path) -> None:
    outcome = take_part(
        tmp_path,
        agent(),
        lambda master: master.says(STARTED),
        lambda master: master.decides("n2"),
    )
    assert outcome.choice == NodeChoice(nodes=("n2",), reason=REASON)


def test_a_node_that_is_left_out_hears_why(tmp_path: Path) -> None:
    outcome = take_part(tmp_path, agent(), lambda master: master.decides("n1"))
    assert outcome.choice.nodes == ("n1",)
    assert outcome.verdict == VerdictReached(nodes=VERDICT.nodes[1:])


def test_a_stop_starts_nobody(tmp_path: Path) -> None:
    outcome = take_part(
        tmp_path,
        agent(),
        lambda master: master.says(STARTED),
        lambda master: master.says(VERDICT),
        lambda master: master.decides(),
    )
    assert outcome.choice.nodes == ()


def test_the_end_of_an_agent_is_written_for_it_and_the_next_one_is_started(tmp_path: Path) -> None:
    dies = "import sys; sys.exit('out of luck' if launch == 0 else 0)"

    def launched(launch: int) -> Callable[[Master], bool]:
        return lambda master: master.says(AgentsLaunched(launch=launch, nodes=list(NODES)))

    take_part(
        tmp_path,
        agent(dies),
        lambda master: master.says(STARTED),
        launched(0),
        lambda _: len(ends_of(tmp_path)) == 1,
        launched(1),
        lambda _: len(ends_of(tmp_path)) == 2,
        lambda master: master.decides("n2"),
    )
    first, second = ends_of(tmp_path)
    assert first.launch == 0
    assert first.reason == "its agent ended: exit code 1: out of luck"
    assert (second.launch, second.reason) == (1, "its agent ended: exit code 0")


def test_agents_of_other_nodes_are_left_to_them(tmp_path: Path) -> None:
    own = agent("raise SystemExit(9)")
    own.start(0, ["n1", "n3"])
    assert own.poll() == []
    assert ends_of(tmp_path) == []


def test_an_agent_that_does_not_leave_is_ended(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    own = agent(f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(600)")
    own.start(0, ["n2"])
    own.stop(0.0)
    assert own.poll() == []


@pytest.mark.parametrize(("heard", "after_s"), [(False, BEGIN_S), (True, SILENCE_S)])
def test_a_first_process_that_says_nothing_is_named_after_a_while(
    tmp_path: Path, heard: bool, after_s: float
) -> None:
    journal.create(tmp_path, [journal.MASTER])
    if heard:
        orders.OrderWriter(tmp_path, STARTED.run_id, NODES)
    now_s = [0.0]

    def pass_time(_seconds: float) -> None:
        now_s[0] += 1.0

    with pytest.raises(JournalError, match="n1, which runs the check"):
        follow(tmp_path, place(), agent(), monotonic=lambda: now_s[0], sleep=pass_time)
    assert after_s < now_s[0] <= after_s + 2


def test_a_name_that_was_used_before_is_refused_on_all_nodes(tmp_path: Path) -> None:
    journal.create(tmp_path, [journal.MASTER])
    journal.Writer(tmp_path, journal.MASTER, lambda: 0.0).append(STARTED, *GO)
    orders.OrderWriter(tmp_path, STARTED.run_id, NODES).conclude(VERDICT, ["n2"], REASON)
    with pytest.raises(JournalError, match="earlier start; give each start its own --rdzv-id"):
        follow(tmp_path, place(chosen_start=True), agent())
    settings = MasterSettings(limits=TimeLimits(), phases=QUICK, make_localizer=make_localizer)
    with pytest.raises(JournalError, match="earlier start"):
        lead(tmp_path, STARTED, agent(), BOUNDS, settings, exclude_slow=False)


def test_a_late_task_learns_what_was_decided_without_it(tmp_path: Path) -> None:
    journal.create(tmp_path, [journal.MASTER])
    writer = orders.OrderWriter(tmp_path, STARTED.run_id, NODES)
    writer.append(AgentsLaunched(launch=0, nodes=list(NODES)), VERDICT)
    writer.conclude(VERDICT, ["n2"], REASON)
    assert follow(tmp_path, place(), agent("raise SystemExit(9)")).choice.nodes == ("n2",)
    assert ends_of(tmp_path) == []


def test_all_processes_of_a_start_find_the_same_directory(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, place())
    assert directory == tmp_path / "lab" / "7" / "0-2"
    journal.create(directory, [journal.MASTER])
    assert directory_of(tmp_path, place()) == directory
    journal.Writer(directory, journal.MASTER, lambda: 0.0).append(STARTED)
    assert directory_of(tmp_path, place()) == directory


def test_a_job_whose_id_was_given_out_before_has_a_directory_of_its_own(tmp_path: Path) -> None:
    directory = directory_of(tmp_path, place())
    journal.create(directory, [journal.MASTER])
    journal.Writer(directory, journal.MASTER, lambda: 0.0).append(STARTED, *GO)
    assert directory_of(tmp_path, place(start="7.0.0.99")) == directory.with_name("0-1002")


def test_the_command_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, slurm_health.cli.main, slurm_health.cli.drop_ins;"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
