# SPDX-License-Identifier: Apache-2.0
"""Real processes of a training, a real agent, and the watch, with all times a tenth of a job's."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_health.records.records import Record
from slurm_health.records.script_records import EventKind, ProgressSeen, TrainingEvent
from slurm_health.system import journal
from slurm_health.system.processes import own_module
from tests.support.full_filesystem import full_filesystem

DEADLINE_S = 90.0
SCALE = 0.15
# A ring of ranks: one works when the one before it has, and hands on.
RING = """
import os, sys
taken, given = map(int, sys.argv[1:])
step = 0
while os.read(taken, 1):
    sum(range(400_000))
    if os.environ["SLURM_PROCID"] == "0":
        print(f"step {step} loss 0.5", flush=True)
    step += 1
    os.write(given, b".")
"""


class Bench:
    """One node with a training, its agent and its watch."""

    def __init__(self, directory: Path, run: Path) -> None:
        self.run = run
        self.output, self._errors = directory / "out", directory / "err"
        self.output.touch()
        self.job = str(os.getpid())
        self.watch: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes = [os.pipe() for _ in range(2)]

    def begin(self) -> None:
        """Start the watch as the supervisor does."""
        words = (f"--directory={self.run}", "--after-s=0", f"--scale={SCALE}")
        told = {"SLURM_JOB_ID": self.job, "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
        told |= {"NCCL_RAS_ENABLE": "0"}
        with self.output.open("ab") as output, self._errors.open("ab") as errors:
            self.watch = subprocess.Popen(
                own_module("slurm_health.training.monitor.watch", *words),
                env={**os.environ, **told},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                cwd=self.output.parent,
            )

    @property
    def said(self) -> str:
        """What the watch has written to the job's output."""
        return self._errors.read_text() if self._errors.exists() else ""

    def train(self) -> list[subprocess.Popen[bytes]]:
        """Start the ranks, which work from now on."""
        told = {"SLURM_JOB_ID": self.job, "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3"}
        told |= {"SLURM_STEP_NUM_TASKS": "2"}
        for rank in range(2):
            ring = (self._pipes[rank][0], self._pipes[1 - rank][1])
            with self.output.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-c", RING, *map(str, ring)],
                    pass_fds=ring,
                    env={**os.environ, **told, "SLURM_PROCID": str(rank)},
                    stdout=output,
                    start_new_session=True,
                )
            self._processes.append(process)
        os.write(self._pipes[0][1], b".")
        return self._processes

    def records(self) -> list[Record]:
        entries = journal.read_all(self.run, journal.MONITOR)
        return [entry.record for entry in entries if entry.record is not None]

    def events(self, kind: EventKind) -> list[TrainingEvent]:
        written = [record for record in self.records() if isinstance(record, TrainingEvent)]
        return [event for event in written if event.event is kind]

    def await_(self, holds: Callable[[], object]) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < until_s, self.said
            time.sleep(0.1)

    def end(self) -> None:
        """End the script and what is left of it."""
        if self.watch is not None and self.watch.stdin is not None:
            self.watch.stdin.close()
            assert self.watch.wait(DEADLINE_S) == 0
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    run = tmp_path / "journal" / "lab" / "1" / "0"
    journal.create(run, [journal.MONITOR])
    bench = Bench(tmp_path, run)
    yield bench
    bench.end()


@pytest.mark.heavy
def test_a_stopped_rank_is_named_once_and_steps_are_recorded_until_then(
    bench: Bench,
) -> None:
    _, stopped = bench.train()
    bench.begin()
    bench.await_(lambda: bench.output.stat().st_size > 10_000)
    os.kill(stopped.pid, signal.SIGSTOP)
    bench.await_(lambda: bench.events(EventKind.HANG))
    (hang,) = bench.events(EventKind.HANG)
    assert hang.diagnosed is not None
    assert (hang.diagnosed.cause, hang.ranks, hang.nodes) == ("rank-stopped", [1], ["n1"])
    assert "the training hangs" in bench.said
    bench.await_(lambda: list(bench.run.glob("hang-*.json")))  # written after the event
    progress = [record for record in bench.records() if isinstance(record, ProgressSeen)]
    assert (progress[-1].stopped, progress[-1].stopped_on) == ([1], ["n1"])
    assert len({record.step for record in progress}) > 2

    os.kill(stopped.pid, signal.SIGCONT)
    bench.await_(lambda: bench.events(EventKind.HANG_OVER))
    assert len(bench.events(EventKind.HANG)) == 1


def test_a_loss_that_is_no_number_is_said_once_with_its_first_line(bench: Bench) -> None:
    bench.output.write_text("".join(f"step {step} loss 0.{step}\n" for step in range(20)))
    with bench.output.open("a") as output:
        output.write("".join(f"step {step} loss nan\n" for step in range(20, 40)))
    bench.begin()
    bench.await_(lambda: any(isinstance(record, ProgressSeen) for record in bench.records()))
    with bench.output.open("a") as output:
        output.write("step 40 loss nan\nstep 41 loss nan\nstep 42 loss nan\n")
    bench.await_(lambda: bench.events(EventKind.LOSS))
    (loss,) = bench.events(EventKind.LOSS)

    assert loss.diagnosed is not None
    assert (loss.step, loss.line) == (20, "step 20 loss nan")
    assert "before step 20" in loss.diagnosed.advice
    assert (loss.diagnosed.cause, loss.diagnosed.accused) == ("not-a-number", [])


@pytest.mark.heavy
@pytest.mark.root
def test_a_full_journal_costs_the_record_alone(tmp_path: Path) -> None:
    with full_filesystem(tmp_path / "full") as full:
        bench = Bench(tmp_path, full)
        try:
            _, stopped = bench.train()
            bench.begin()
            bench.await_(lambda: bench.output.stat().st_size > 10_000)
            os.kill(stopped.pid, signal.SIGSTOP)
            bench.await_(lambda: "this is not recorded" in bench.said)
        finally:
            bench.end()
