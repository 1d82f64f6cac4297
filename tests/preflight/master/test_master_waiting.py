# SPDX-License-Identifier: Apache-2.0
"""A master whose agents never start, are lost or unheard: by its own clock, without processes."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_health.preflight.master.master import (
    HEARTBEAT_S,
    SHORTEST_POLL_S,
    SHORTEST_SWEEP_S,
    SILENCE_S,
    Master,
    poll_interval_s,
)
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.orders import News
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.records.records import (
    AgentsLost,
    AgentStarted,
    Disposition,
    GroupAborted,
    JobOutcome,
    NodesAdmitted,
    RoundEnded,
    RoundStarted,
    VerdictReached,
)
from slurm_health.records.verdict import Level
from slurm_health.system import journal
from tests.preflight.master.test_master import NODES, levels
from tests.support.journals import Clock, run_started
from tests.support.session_story import QUICK, measured, ready


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

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:  # noqa: ARG002 - nobody rings
        self._sleep(timeout_s)
        return []

    def stop(self, grace_s: float = 0.0) -> None:  # noqa: ARG002 - a launcher's signature
        self.stopped = True


def controller(limits: TimeLimits | None = None) -> Controller:
    return Controller(NODES, make_localizer, limits or TimeLimits(), QUICK)


def ran(
    run: Path,
    launcher: IdleLauncher,
    clock: Clock,
    limits: TimeLimits | None = None,
    **more: Any,
) -> VerdictReached:
    """Run a check to its end; return its verdict."""
    master = Master(run, controller(limits), launcher, clock=clock, **more)
    master.open(run_started(NODES))
    verdict = master.run()
    master.close()
    return verdict


def test_a_check_in_which_nothing_ever_starts_ends_by_the_clock_alone(tmp_path: Path) -> None:
    clock = Clock(1000.0)

    def sleep(seconds: float) -> None:
        assert seconds > 0
        clock.now_s += max(seconds, 0.5)

    launcher = IdleLauncher(sleep)
    began = time.monotonic()
    verdict = ran(tmp_path / "run", launcher, clock)

    assert levels(verdict) == dict.fromkeys(NODES, Level.INCONCLUSIVE)
    assert launcher.started == [(0, NODES)]
    assert launcher.stopped
    assert clock.now_s < 1000.0 + 2 * TimeLimits().start_s
    assert time.monotonic() - began < 60


def test_a_master_that_waits_says_so_long_before_anybody_takes_it_for_dead(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    turns_s: list[float] = []
    steps_s = iter([*[0.5] * 40, -25.0])  # then it is set back

    def sleep(_seconds: float) -> None:
        clock.now_s += next(steps_s, 0.5)

    launcher = IdleLauncher(sleep)
    ran(tmp_path / "run", launcher, clock, alive=lambda: turns_s.append(clock.now_s))

    times_s = [entry.time_s for entry in journal.read_all(tmp_path / "run", journal.MASTER)]
    gaps_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert max(map(abs, gaps_s)) <= 2.5 * HEARTBEAT_S
    assert sum(gap == HEARTBEAT_S for gap in gaps_s) > 5
    assert 5 * HEARTBEAT_S < SILENCE_S
    # Its supervisor hears of every turn, so that only a master that hangs is silent.
    assert max(after - before for before, after in itertools.pairwise(turns_s)) == 0.5


class WritingLauncher(IdleLauncher):
    """Has agents that write what they should."""

    def __init__(self, directory: Path, clock: Clock, *, are_ready: bool) -> None:
        super().__init__()
        self.directory, self.clock = directory, clock
        journal.create(directory, NODES)
        self.writers = {node: journal.Writer(directory, node, clock) for node in NODES}
        self._are_ready = are_ready

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        super().start(launch, nodes)
        for node in nodes:
            here = AgentStarted(node=node, launch=launch, hostname=node, address="10.0.0.1")
            self.writers[node].append(here, *([ready(node, launch)] if self._are_ready else []))


class LosingLauncher(WritingLauncher):
    """Has agents of which only the first rings arrive."""

    waits = 0

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:  # noqa: ARG002 - none is waited
        self.waits += 1
        if self.waits == 1:
            return [News(node) for node in NODES]
        if self.waits == 2:
            for node in NODES:
                self.writers[node].append(ready(node))
        self.clock.now_s += READY_S + 0.5
        return []


class EndingLauncher(WritingLauncher):
    """Has agents of which one ends as soon as it has reported, before its ring is heard."""

    ended = False

    def poll(self) -> list[AgentsLost]:
        records = [each.record for each in journal.read_all(self.directory, journal.MASTER)]
        begun = [each for each in records if isinstance(each, RoundStarted)]
        if not begun or self.ended:
            return []
        self.ended = True
        for node in NODES:
            self.writers[node].append(measured(node, index=begun[-1].round)[0])
        return [AgentsLost(launch=0, nodes=[NODES[0]], reason="its step ended")]

    def wait(self, timeout_s: float, gather_s: float) -> list[News]:  # noqa: ARG002 - none is waited
        self.clock.now_s += timeout_s
        return [] if self.ended else [News(node) for node in NODES]


READY_S = 3.0


def test_nodes_whose_rings_are_lost_are_read_before_they_count_as_silent(tmp_path: Path) -> None:
    assert READY_S + 0.5 < SHORTEST_SWEEP_S
    clock = Clock(1000.0)
    run = tmp_path / "run"
    ran(run, LosingLauncher(run, clock, are_ready=False), clock, limits=TimeLimits(ready_s=READY_S))

    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    assert [each.nodes for each in records if isinstance(each, NodesAdmitted)] == [list(NODES)]


def test_what_an_agent_wrote_just_before_it_ended_is_read_before_it_counts_as_silent(
    tmp_path: Path,
) -> None:
    clock = Clock(1000.0)
    run = tmp_path / "run"
    ran(run, EndingLauncher(run, clock, are_ready=True), clock)

    records = [entry.record for entry in journal.read_all(run, journal.MASTER)]
    first = next(each for each in records if isinstance(each, RoundEnded))
    assert first == RoundEnded(round=0)
    assert not any(isinstance(each, GroupAborted) and each.round == 0 for each in records)


def test_how_a_run_ends_is_written_once_and_again_only_when_it_changes(tmp_path: Path) -> None:
    master = Master(tmp_path / "run", controller(), IdleLauncher())
    master.open(run_started(NODES))
    requeue = JobOutcome(disposition=Disposition.REQUEUE, exit_code=1)
    stop = JobOutcome(disposition=Disposition.STOP, exit_code=1)

    for finished in (requeue, requeue, stop, stop):
        master.finish(finished)
    master.close()

    entries = journal.read_all(tmp_path / "run", journal.MASTER)
    assert [e.record for e in entries if isinstance(e.record, JobOutcome)] == [requeue, stop]


@pytest.mark.parametrize("nodes", [1, 4, 64, 1024, 4096])
def test_the_load_on_the_filesystem_is_bounded_whatever_the_size_of_the_run(nodes: int) -> None:
    interval_s = poll_interval_s(nodes)

    assert interval_s >= SHORTEST_POLL_S
    assert 2 * nodes / interval_s <= 2001
