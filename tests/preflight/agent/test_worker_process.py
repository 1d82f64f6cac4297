# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from slurm_health.preflight.agent.worker_process import (
    STDERR_LINES,
    DeviceOpened,
    Ready,
    Worker,
    WorkerEvent,
    end_together,
)
from slurm_health.preflight.agent.workers import Workers
from tests.support.frozen import FREEZER, frozen
from tests.support.supervised import eventually, with_variable, write_executable

E = TypeVar("E", bound=WorkerEvent)
FAKE = Path(__file__).parents[2] / "support" / "fake_worker.py"


class Bench:
    """Workers of one test, with fake interpreters."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[Worker] = []

    def start(self, python: str | Path) -> Worker:
        environ = {**os.environ, "FAKE_WORKER_DIR": str(self.directory)}
        worker = Worker(python=str(python), local_rank=0, threads=1, devices=0, environ=environ)
        self.workers.append(worker)
        return worker

    def all_of_a_node(self, count: int, **environ: str) -> Workers:
        workers = Workers(
            python=str(FAKE),
            on_cpus=count,
            address="127.0.0.1",
            environ={
                **os.environ,
                "FAKE_WORKER_DIR": str(self.directory),
                "CUDA_VISIBLE_DEVICES": "",
                **environ,
            },
            monotonic=time.monotonic,
        )
        workers.replace()
        assert workers.start_due() == ""
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


def hears(worker: Worker, kind: type[E]) -> E:
    found: list[E] = []

    def heard() -> bool:
        found.extend(event for event in worker.read_events() if isinstance(event, kind))
        return bool(found)

    eventually(heard, f"the event {kind.__name__}")
    return found[0]


def end_of(worker: Worker) -> str:
    eventually(lambda: worker.ended() is not None, "the worker's end")
    return worker.ended() or ""


def test_an_interpreter_that_is_not_there_is_an_end_with_its_reason(bench: Bench) -> None:
    worker = bench.start("/nonexistent/python")

    assert worker.ended() == "cannot run /nonexistent/python: No such file or directory"
    assert worker.descriptors == ()
    assert worker.read_events() == []
    worker.send({"op": "abort", "round": 0})
    worker.kill()


def test_the_last_line_of_standard_error_is_the_reason_of_an_end(bench: Bench) -> None:
    worker = bench.script("echo Traceback >&2; echo 'ImportError: no torch' >&2; exit 1")

    assert end_of(worker) == "exit code 1: ImportError: no torch"


def test_the_words_of_a_device_count_more_than_the_frames_and_hints_that_follow_them(
    bench: Bench,
) -> None:
    frames = "; ".join(f"echo 'frame #{number}: main + 0x21' >&2" for number in range(30))
    ecc = "CUDA error: uncorrectable ECC error encountered"
    worker = bench.script(f"echo '  what():  {ecc}' >&2; echo a hint >&2; {frames}; exit 3")

    assert end_of(worker) == f"exit code 3: {ecc}"


def test_a_signal_that_ended_a_worker_is_named(bench: Bench) -> None:
    assert end_of(bench.script("kill -SEGV $$")) == "killed by SIGSEGV"


def test_what_a_library_prints_is_no_event(bench: Bench) -> None:
    worker = bench.script("""echo 'NCCL INFO {'; echo; echo '{"event": "opened"}'; exec sleep 99""")

    assert hears(worker, DeviceOpened) == DeviceOpened()


def test_an_event_that_comes_in_two_pieces_is_one_event(bench: Bench) -> None:
    worker = bench.script("""printf '{"event":'; sleep 0.1; echo ' "opened"}'; exec sleep 100""")

    assert hears(worker, DeviceOpened) == DeviceOpened()


def test_a_worker_that_writes_without_end_is_not_kept_in_memory(bench: Bench) -> None:
    worker = bench.script(
        f"i=0; while [ $i -lt {STDERR_LINES * 50} ]; do echo $i >&2; i=$((i+1)); done"
    )

    assert end_of(worker) == f"exit code 0: {STDERR_LINES * 50 - 1}"


def test_a_command_to_a_worker_that_has_ended_is_no_error(bench: Bench) -> None:
    worker = bench.script("exit 3")
    end_of(worker)

    worker.send({"op": "abort", "round": 0})
    worker.send({"op": "abort", "round": 0})

    assert worker.ended() == "exit code 3"


def test_a_stopped_or_deaf_worker_is_killed_with_its_children(bench: Bench) -> None:
    worker = bench.script("trap '' TERM; sleep 100 & sleep 100 & wait")
    eventually(lambda: len(bench.processes()) == 3, "its children")
    for pid in bench.processes():
        os.kill(pid, signal.SIGSTOP)

    assert end_together([worker]) == []

    eventually(lambda: not bench.processes(), "their end")
    assert worker.ended() == "killed"


def test_a_worker_that_is_told_to_leave_may_do_its_last_work(bench: Bench) -> None:
    worker = bench.script("cat; cd $FAKE_WORKER_DIR; mkdir left")

    end_together([worker], leave_s=60.0)

    assert (bench.directory / "left").is_dir()


def test_nodes_that_share_nvlink_are_tested_over_their_network(bench: Bench) -> None:
    environ = {**os.environ, "FAKE_WORKER_DIR": str(bench.directory), "NCCL_MNNVL_ENABLE": "1"}
    workers = Workers(
        python=str(FAKE),
        on_cpus=1,
        address="127.0.0.1",
        environ={**environ, "CUDA_VISIBLE_DEVICES": ""},
        monotonic=time.monotonic,
    )
    workers.replace()
    assert workers.start_due() == ""
    bench.workers += workers

    def told() -> list[bytes]:  # nothing between the fork of a process and its exec
        found = [Path(f"/proc/{pid}/environ").read_bytes() for pid in bench.processes()]
        return found[0].split(b"\0") if found else []

    eventually(lambda: b"NCCL_MNNVL_ENABLE=0" in told(), "a worker that was told")
    assert workers.end() == ""


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
        assert (workers.start_due(), len(workers)) == ("", 0)
        assert len(end_together(bench.workers, wait_s=0.1)) == 3
    eventually(lambda: workers.start_due() == "" and len(workers) == 3, "others in their place")
    assert workers.end() == ""


def test_torch_ends_no_worker_because_a_partner_is_gone_whatever_the_job_sets(
    bench: Bench,
) -> None:
    (worker,) = bench.all_of_a_node(
        1, TORCH_NCCL_ASYNC_ERROR_HANDLING="1", TORCH_NCCL_CUDA_EVENT_CACHE="1"
    )
    hears(worker, Ready)

    (pid,) = bench.processes()
    assert pid in with_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    assert pid in with_variable("TORCH_NCCL_CUDA_EVENT_CACHE", "0")


def _is_killed(pid: int) -> bool:
    """Tell whether the signal that kills waits for a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(line.split()[1] for line in status if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)
