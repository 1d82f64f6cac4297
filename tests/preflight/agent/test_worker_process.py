# SPDX-License-Identifier: Apache-2.0
"""A worker as a process: its words, its end, and whether it stands still."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from slurm_health.preflight.agent.worker_process import (
    LOOK_S,
    STOPPED_S,
    Gone,
    Line,
    Ready,
    StandstillWatch,
    State,
    Worker,
    end_together,
)
from slurm_health.preflight.agent.workers import AgentSettings, Workers
from slurm_health.records.records import Record, WorkersFailed
from tests.preflight.agent.frozen import FREEZER, frozen
from tests.support.rows import rows
from tests.support.supervised import eventually, with_variable, write_executable

L = TypeVar("L", bound=Line)
FAKE = Path(__file__).parents[2] / "support" / "fake_worker.py"


class Bench:
    """Workers of one test, with fake interpreters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[Worker] = []
        self.said: list[Record] = []

    def start(self, python: str | Path) -> Worker:
        environ = {**os.environ, "FAKE_WORKER_DIR": str(self.directory)}
        worker = Worker(python=str(python), local_rank=0, threads=1, devices=0, environ=environ)
        self.workers.append(worker)
        return worker

    def all_of_a_node(self, count: int = 1, environ: Mapping[str, str] | None = None) -> Workers:
        devices = ",".join(map(str, range(count))) if count > 1 else ""
        workers = Workers(
            AgentSettings(
                node="n1",
                directory=self.directory,
                run_id="r1",
                launch=0,
                python=str(FAKE),
                poll_s=1.0,
                silence_s=60.0,
            ),
            address="127.0.0.1",
            environ={
                **os.environ,
                "FAKE_WORKER_DIR": str(self.directory),
                "CUDA_VISIBLE_DEVICES": devices,
                **(environ or {}),
            },
            say=self.said.append,
            monotonic=time.monotonic,
        )
        workers.replace()
        self.workers += workers
        return workers

    def processes(self) -> list[int]:
        """Return the workers that run, and their children."""
        return with_variable("FAKE_WORKER_DIR", str(self.directory))

    def script(self, text: str) -> Worker:
        return self.start(write_executable(self.directory / "python", f"#!/bin/sh\n{text}\n"))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    end_together(bench.workers)


def hears(worker: Worker, kind: type[L]) -> L:
    found: list[L] = []

    def heard() -> bool:
        found.extend(line for line in worker.read_lines() if isinstance(line, kind))
        return bool(found)

    eventually(heard, f"the line {kind.__name__}")
    return found[0]


def end_of(worker: Worker) -> str:
    eventually(lambda: worker.gone() is not None, "the worker's end")
    gone = worker.gone()
    assert gone is not None
    return gone.how


def test_an_interpreter_that_is_not_there_is_an_end_with_its_reason(bench: Bench) -> None:
    worker = bench.start("/nonexistent/python")

    assert end_of(worker) == "cannot run /nonexistent/python: No such file or directory"
    assert worker.descriptors == ()
    assert worker.read_lines() == []
    worker.send({"op": "abort", "round": 0})
    worker.kill()


@rows
def test_the_end_of_a_worker_has_the_reason_that_it_told(
    bench: Bench, script: str, reason: str
) -> None:
    assert end_of(bench.script(script)) == reason


def test_a_line_may_come_in_two_pieces_and_what_a_library_prints_is_none(bench: Bench) -> None:
    first, second = '{"event": "state", ', '"state": "opened"}'
    rubbish = ("NCCL INFO {", "", '{"event": "done"}', "[" * 5000)
    words = "; ".join(f"echo '{text}'" for text in rubbish)
    worker = bench.script(f"{words}; printf '{first}'; sleep 0.1; echo '{second}'; exec sleep 99")

    assert hears(worker, Line) == State(state="opened")


def test_a_stopped_or_deaf_worker_is_killed_with_its_children(bench: Bench) -> None:
    worker = bench.script("trap '' TERM; sleep 100 & sleep 100 & wait")
    eventually(lambda: len(bench.processes()) == 3, "its children")
    for pid in bench.processes():
        os.kill(pid, signal.SIGSTOP)

    assert end_together([worker]) == []

    eventually(lambda: not bench.processes(), "their end")
    assert end_of(worker) == "killed"


@pytest.mark.skipif(not FREEZER.is_dir(), reason="needs root and the freezer of cgroup v1")
def test_all_workers_are_killed_before_any_is_waited_for(bench: Bench) -> None:
    workers = bench.all_of_a_node(3)
    for worker in workers:
        hears(worker, Ready)

    with contextlib.ExitStack() as stack:
        processes = bench.processes()
        for pid in processes:
            stack.enter_context(frozen(pid))
        workers.replace()

        assert [_is_killed(pid) for pid in processes] == [True] * 3
        workers.tick()
        assert len(workers) == 0
        assert len(end_together(bench.workers, wait_s=0.1)) == 3

    def others() -> bool:
        workers.tick()
        return len(workers) == 3

    eventually(others, "others in their place")
    assert not [record for record in bench.said if isinstance(record, WorkersFailed)]
    assert workers.end() == ""


def test_what_would_spoil_a_check_is_off_whatever_the_job_sets(bench: Bench) -> None:
    off = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_CUDA_EVENT_CACHE", "NCCL_MNNVL_ENABLE")
    settings = dict.fromkeys(off, "0") | {"OMP_WAIT_POLICY": "PASSIVE"}
    (worker,) = bench.all_of_a_node(environ=dict.fromkeys(settings, "1"))
    hears(worker, Ready)

    (pid,) = bench.processes()
    assert all(pid in with_variable(name, value) for name, value in settings.items())


def _is_killed(pid: int) -> bool:
    """Tell whether the signal that kills waits for a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(line.split()[1] for line in status if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)


@pytest.fixture
def process() -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    eventually(lambda: state(child.pid) == "S", "a process that sleeps")
    yield child.pid
    child.kill()
    child.wait(20)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def watched(pid: int, for_s: float, every_s: float = LOOK_S) -> Gone | None:
    """Return what is found of a process that is looked at so long, and so often."""
    watch = StandstillWatch(pid)
    for look in range(round(for_s / every_s) + 1):
        watch.look(1000.0 + look * every_s)
    return watch.found()


def test_a_process_that_goes_on_again_has_not_stood_still(process: int) -> None:
    watch = StandstillWatch(process)
    for look in range(40):
        os.kill(process, signal.SIGSTOP)
        eventually(lambda: state(process) == "T", "a stopped process")
        watch.look(1000.0 + look * LOOK_S)
        os.kill(process, signal.SIGCONT)
        eventually(lambda: state(process) == "S", "a process that goes on")

    assert watch.found() is None


def test_a_process_that_waits_or_works_is_never_said_to_stand_still(process: int) -> None:
    assert watched(process, 3600.0) is None
    assert watched(os.getpid(), 3600.0) is None


def test_a_process_that_was_stopped_by_a_signal_stands_still_if_somebody_looked(
    process: int,
) -> None:
    os.kill(process, signal.SIGSTOP)
    eventually(lambda: state(process) == "T", "a stopped process")

    assert watched(process, STOPPED_S - LOOK_S) is None
    assert watched(process, 600.0, every_s=600.0) is None
    found = watched(process, STOPPED_S)

    assert found == Gone("stopped by a signal for 1 s", still=True, stopped=True)
