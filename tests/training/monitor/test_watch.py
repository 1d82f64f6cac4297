# SPDX-License-Identifier: Apache-2.0
"""Trainings without a heartbeat: real processes that write, and the real monitor of their node."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_health.records.script_records import EventKind, ProgressSeen, TrainingEvent
from slurm_health.system import journal
from slurm_health.system.processes import NOTHING, PIPE, own_module, start_tied
from slurm_health.training.diagnosis.by_movement import Movement
from slurm_health.training.diagnosis.by_output import OutputProgress
from slurm_health.training.diagnosis.pace import HangPatience
from slurm_health.training.monitor import closer_look
from slurm_health.training.monitor.findings import WatchFindings
from slurm_health.training.monitor.monitors import Monitors, ScriptOver
from slurm_health.training.monitor.output_files import Tails
from slurm_health.training.monitor.ranks import Ranks
from slurm_health.training.monitor.watch import OutputWatch
from tests.support.full_filesystem import full_filesystem

DEADLINE_S = 90.0
# A script's patience, minutes made seconds; looks come as fast as they can.
MOVES = HangPatience(at_least_s=3.0, steps=2.0, pauses=2.0, first_s=600.0, storage_s=1.0)
PATIENCE = HangPatience(at_least_s=3.0, steps=2.0, pauses=1.0, first_s=6.0, storage_s=1.0)
TRAINING = """
import os, sys, time
how, steps = sys.argv[1], int(sys.argv[2])
for step in range(0 if how == "rings" else steps):
    print(f"step {step} loss 0.5", end="\\r", flush=True)
    time.sleep(0.1)
print(flush=True)
while how == "rings":
    os.read(int(sys.argv[3]), 1)
    sum(range(100000))
    time.sleep(0.02)
    os.write(int(sys.argv[4]), b".")
while how == "works":
    sum(range(10000))
if how == "pipe":
    os.mkfifo("pipe")
    open("pipe").read()
if how == "sleeps":
    time.sleep(600)
"""


class Bench:
    """One node with a training that writes to a file, and what watches it."""

    def __init__(self, directory: Path, journal_at: Path | None = None) -> None:
        self.directory = directory
        self.output = directory / "out"
        self.output.touch()
        self.said = io.StringIO()
        self.run = journal_at
        self.job = str(os.getpid())
        self.started: list[subprocess.Popen[bytes]] = []
        self.looks = 0
        silent, self._alive = os.pipe()
        self._control = silent
        tails = Tails("", directory, {}, (self.output,))
        self.watch = OutputWatch(
            tails,
            OutputProgress(PATIENCE),
            Movement(MOVES),
            self.monitors,
            ["n1"],
            WatchFindings(journal_at, {"NCCL_RAS_ENABLE": "0"}, self.said),
            between_s=2.0,
        )
        self.command = own_module("slurm_health.training.monitor.node", self.job, "n1", "5")

    def monitors(self) -> Monitors:
        self.looks += 1
        process = start_tied(
            self.command,
            environ=dict(os.environ),
            stdin=PIPE,
            stdout=PIPE,
            stderr=NOTHING,
            signal_mask=(),
        )
        return Monitors(process, ["n1"], self._control)

    def train(
        self, how: str, steps: int = 40, rank: int = 0, ring: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        told = {"SLURM_JOB_ID": self.job, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3"}
        directory = self.directory / str(rank)
        directory.mkdir(exist_ok=True)
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", TRAINING, how, str(steps), *map(str, ring)],
                pass_fds=ring,
                env={**os.environ, **told, "SLURM_PROCID": str(rank)},
                stdout=output,
                cwd=directory,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def look_until(self, holds: Callable[[], object]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < until_s, self.said.getvalue()
            self.watch.look()
            time.sleep(0.2)

    def script_ends(self) -> None:
        os.close(self._alive)

    def clean_up(self) -> None:
        for each in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    run = tmp_path / "journal" / "lab" / "1" / "0"
    journal.create(run, [journal.MONITOR])
    bench = Bench(tmp_path, run)
    yield bench
    bench.clean_up()


def test_a_loss_that_is_no_number_any_more_is_told_once_and_the_training_goes_on(
    bench: Bench,
) -> None:
    bench.output.write_text("".join(f"step {step} loss nan\n" for step in range(40)))
    bench.look_until(lambda: "the loss is NaN or infinite" in bench.said.getvalue())
    with bench.output.open("a") as output:
        output.write("step 40 loss nan\nstep 41 loss nan\n")
    bench.watch.look()

    assert bench.run is not None
    told = [entry.record for entry in journal.read_all(bench.run, journal.MONITOR)]
    (found,) = [record for record in told if isinstance(record, TrainingEvent)]
    assert found.diagnosed is not None
    assert (found.event, found.line) == (EventKind.LOSS, "step 1 loss nan")
    assert (found.diagnosed.cause, found.diagnosed.accused) == ("not-a-number", [])
    assert bench.looks == 0


def test_progress_is_recorded_once_a_minute_and_when_a_rank_is_stopped(bench: Bench) -> None:
    training = bench.train("sleeps")
    ranks = Ranks(bench.job, "n1", "")
    bench.look_until(lambda: bench.output.stat().st_size > 500)

    def record(now_s: float) -> list[ProgressSeen]:
        ranks.find()
        bench.watch.record(ranks.now(), now_s=now_s)
        assert bench.run is not None
        seen = [entry.record for entry in journal.read_all(bench.run, journal.MONITOR)]
        return [each for each in seen if isinstance(each, ProgressSeen)]

    now_s = time.monotonic()
    (first,) = record(now_s)
    assert first.line.startswith("step ")
    assert (first.node, first.ranks, first.stopped) == ("n1", 1, [])
    assert first.step > 5
    assert len(record(now_s + 59)) == 1
    assert len(record(now_s + 61)) == 2

    os.kill(training.pid, signal.SIGSTOP)
    until_s = time.monotonic() + DEADLINE_S
    while (seen := record(now_s + 62))[-1].stopped != [0]:
        assert time.monotonic() < until_s
    assert len(seen) == 3


@pytest.mark.heavy
def test_a_training_that_stands_still_is_said_and_recorded_and_goes_on(bench: Bench) -> None:
    bench.train("sleeps")
    stopped = bench.train("sleeps", rank=1)
    bench.look_until(lambda: bench.output.stat().st_size > 500)
    os.kill(stopped.pid, signal.SIGSTOP)
    bench.look_until(lambda: "seems to hang" in bench.said.getvalue())
    assert bench.run is not None
    (entry,) = journal.read_all(bench.run, journal.MONITOR)
    assert isinstance(entry.record, TrainingEvent)
    assert entry.record.diagnosed is not None

    assert (entry.record.diagnosed.cause, entry.record.ranks) == ("rank-stopped", [1])
    assert entry.record.line.startswith("step ")
    bench.train("ends", steps=80, rank=2)
    bench.look_until(lambda: "goes on" in bench.said.getvalue())
    over = journal.read_all(bench.run, journal.MONITOR)[-1].record
    assert isinstance(over, TrainingEvent)
    assert over.event is EventKind.HANG_OVER


def move_until(bench: Bench, ranks: Ranks, holds: Callable[[], object]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < until_s, bench.said.getvalue()
        ranks.find()
        bench.watch.move(ranks.alone(), time.monotonic())
        time.sleep(0.5)


@pytest.mark.heavy
def test_a_rank_that_says_nothing_and_is_stopped_is_named_and_goes_on(bench: Bench) -> None:
    pipes = [os.pipe() for _ in range(2)]
    ranks = Ranks(bench.job, "n1", "")
    waits, stopped = (
        bench.train("rings", rank=rank, ring=(pipes[rank - 1][0], pipes[rank][1]))
        for rank in range(2)
    )
    os.write(pipes[1][1], b".")
    seen = {"moves": 0}

    def moved_often() -> bool:
        seen["moves"] += 1
        return seen["moves"] > 15

    move_until(bench, ranks, moved_often)
    assert bench.looks == 0
    os.kill(stopped.pid, signal.SIGSTOP)
    move_until(bench, ranks, lambda: "the training hangs" in bench.said.getvalue())
    assert bench.run is not None
    (entry,) = journal.read_all(bench.run, journal.MONITOR)
    assert isinstance(entry.record, TrainingEvent)
    assert entry.record.diagnosed is not None
    assert (entry.record.diagnosed.cause, entry.record.ranks) == ("rank-stopped", [1])
    assert entry.record.at_rest
    assert "all ranks have only waited" in bench.said.getvalue()

    os.kill(stopped.pid, signal.SIGCONT)
    move_until(bench, ranks, lambda: "goes on" in bench.said.getvalue())
    assert waits.poll() is None


@pytest.mark.skipif(closer_look.find_py_spy() is not None, reason="py-spy tells more")
def test_without_py_spy_the_kernel_tells_who_waits_for_a_file(bench: Bench) -> None:
    bench.train("sleeps")
    bench.train("pipe", steps=0, rank=1)
    bench.look_until(lambda: "seems to hang" in bench.said.getvalue())

    assert "rank 1 on n1 waits for a file" in bench.said.getvalue()
    assert "py-spy is not installed" in bench.said.getvalue()


@pytest.mark.heavy
@pytest.mark.skipif(closer_look.find_py_spy() is None, reason="py-spy is not installed")
def test_with_py_spy_a_rank_is_seen_where_it_is(bench: Bench) -> None:
    bench.train("sleeps")
    bench.train("pipe", steps=0, rank=1)
    bench.look_until(lambda: "seems to hang" in bench.said.getvalue())

    assert "in code of their own" in bench.said.getvalue()


@pytest.mark.heavy
def test_a_training_that_prints_no_more_and_works_is_well(bench: Bench) -> None:
    bench.train("works")
    bench.look_until(lambda: bench.looks >= 1)

    assert bench.said.getvalue() == ""


@pytest.mark.heavy
def test_monitors_that_die_or_cannot_be_started_leave_a_job_unseen(bench: Bench) -> None:
    bench.command = ("/bin/false",)
    bench.train("sleeps")
    bench.look_until(lambda: bench.looks >= 1)

    assert bench.said.getvalue() == ""


@pytest.mark.heavy
def test_a_script_that_ends_while_it_is_looked_at_is_not_held_up(bench: Bench) -> None:
    bench.train("sleeps")
    bench.script_ends()
    with pytest.raises(ScriptOver):
        bench.look_until(lambda: False)


@pytest.mark.heavy
def test_five_scripts_one_after_another_are_well_until_one_hangs(bench: Bench) -> None:
    for _ in range(4):
        process = bench.train("ends", steps=15)
        bench.look_until(lambda ended=process: ended.poll() is not None)  # type: ignore[misc]
    assert bench.said.getvalue() == ""
    bench.train("sleeps")
    bench.look_until(lambda: "seems to hang" in bench.said.getvalue())


@pytest.mark.heavy
@pytest.mark.root
def test_a_full_journal_costs_the_record_alone(tmp_path: Path) -> None:
    with full_filesystem(tmp_path / "full") as full:
        bench = Bench(tmp_path, full)
        try:
            bench.train("sleeps")
            bench.look_until(lambda: "this is not recorded" in bench.said.getvalue())
        finally:
            bench.clean_up()

    # Its output and its movement tell of it; whichever does first is said.
    assert re.search(r"the training (hangs|seems to hang)", bench.said.getvalue())
