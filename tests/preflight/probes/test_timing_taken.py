# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from slurm_health.preflight.probes.timing import (
    Machine,
    Stopwatch,
    TimedWindow,
    taken_of_s,
)
from slurm_health.system.killable import Answered, run_one

BURNER = f"{sys.executable} -c 'while True: pass' & echo $!; wait"
IDLE = Machine(busy_s=0.0, stolen_s=0.0, own_s=0.0)


@pytest.fixture
def one_processor() -> Iterator[int]:
    """Have this process, and what it starts, on one processor only."""
    usual = os.sched_getaffinity(0)
    chosen = min(usual)
    os.sched_setaffinity(0, {chosen})
    yield chosen
    os.sched_setaffinity(0, usual)


def apart(work: Callable[[], object]) -> Any:
    """Return what work in a process of its own returns: what runs beside this one is not its."""
    answer = run_one(lambda: msgspec.json.encode(work()), 60.0)
    assert isinstance(answer, Answered), answer
    return msgspec.json.decode(answer.data)


def burn_for(time_s: float) -> None:
    end_s = time.perf_counter() + time_s
    while time.perf_counter() < end_s:
        pass


@pytest.fixture
def burner() -> Iterator[None]:
    """Have a process of somebody else's burn: a grandchild, as who was started with us is ours."""
    with subprocess.Popen(["sh", "-c", BURNER], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        yield
        os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("one_processor", "burner")
def test_what_another_process_takes_of_a_processor_is_left_out() -> None:
    def work() -> list[Any]:
        watch, before_s = Stopwatch(), time.thread_time()
        for _ in range(5):
            watch.begin()
            burn_for(0.1)
            watch.end(1)
        sample = watch.sample()
        return [time.thread_time() - before_s, sum(sample.iteration_ms), sum(sample.taken_ms)]

    ran_s, elapsed_ms, taken_ms = apart(work)

    assert taken_ms >= 0.1 * elapsed_ms
    assert elapsed_ms - taken_ms == pytest.approx(ran_s * 1e3, abs=0.2 * elapsed_ms)


def test_workers_of_one_node_take_nothing_from_each_other() -> None:
    windows = [TimedWindow(elapsed_s=1.0, unserved_s=0.5, ran_s=0.5)]

    assert taken_of_s(windows, IDLE, Machine(busy_s=1.0, stolen_s=0.0, own_s=1.0)) == [0.0]
    assert taken_of_s(windows, IDLE, Machine(busy_s=1.0, stolen_s=0.0, own_s=0.8)) == [
        pytest.approx(0.2)
    ]


def test_no_more_is_taken_than_a_thread_waited_for() -> None:
    windows = [TimedWindow(elapsed_s=1.0, unserved_s=0.1, ran_s=0.9)]

    assert taken_of_s(windows, IDLE, Machine(busy_s=64.0, stolen_s=0.0, own_s=0.9)) == [
        pytest.approx(0.1)
    ]


def test_what_the_busiest_thread_ran_nobody_took() -> None:
    windows = [TimedWindow(elapsed_s=1.0, unserved_s=0.9, ran_s=0.4)]

    taken_s = taken_of_s(windows, IDLE, Machine(busy_s=9.0, stolen_s=0.0, own_s=0.4))

    assert taken_s == [pytest.approx(0.6)]


def test_a_hypervisor_takes_of_the_time_in_which_a_thread_seems_to_run() -> None:
    windows = [TimedWindow(elapsed_s=1.0, unserved_s=0.0, ran_s=0.8)]

    taken_s = taken_of_s(windows, IDLE, Machine(busy_s=0.75, stolen_s=0.25, own_s=0.75))

    assert taken_s == [pytest.approx(0.2)]


def test_where_nobody_takes_anything_there_is_nothing_to_tell() -> None:
    watch = Stopwatch()
    watch.begin()
    watch.end(4)

    assert not watch.sample().taken_ms
