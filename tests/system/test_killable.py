# SPDX-License-Identifier: Apache-2.0
"""A hung, dying or chatty child costs its time limit and no more."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from slurm_health.system.killable import (
    ANSWER_BYTES,
    Answered,
    Broke,
    Child,
    Hung,
    WorkResult,
    limit_memory,
    run_all,
    run_one,
)
from tests.lab import cgroups
from tests.support.supervised import descendants, eventually

LONG_S = 3600.0


def _sleep() -> bytes:
    time.sleep(LONG_S)
    return b""


def hung(outcome: WorkResult, limit_s: float) -> bool:
    """Tell whether work hung for so long, and has ended.

    The memory of a process of tests takes a machine that is busy enough longer to give back than a
    child is waited for.
    """
    if not isinstance(outcome, Hung) or outcome.limit_s != limit_s:
        return False
    return not outcome.abandoned or os.waitpid(outcome.abandoned, 0)[0] == outcome.abandoned


@pytest.mark.skipif(os.getuid() != 0, reason="only root takes processor time away")
def test_a_wait_for_a_processor_that_is_not_over_counts() -> None:
    controller, name = cgroups.find_cpu_controller(), f"waits{os.getpid()}"
    if controller is None:
        pytest.skip("no cpu controller that can be used")
    cgroups.create(controller, name, ("n1",))
    # It runs for 1 ms, and then for a second not at all.
    cgroups.set_quota(controller, name, "n1", 0.001, period_us=1_000_000)

    def work() -> bytes:
        while True:
            pass

    child = Child(work, 600, 0)
    try:
        procs = cgroups.node_cgroup(controller, name, "n1") / "cgroup.procs"
        procs.write_text(str(child.pid))
        eventually(lambda: child.hung().unserved_s > 590, "no wait was counted", within_s=60)
    finally:
        child.kill()
        child.end(time.monotonic())
        os.close(child.pipe)
        cgroups.remove(controller, name)


@pytest.mark.parametrize("how", ["raises", "crashes", "exits", "answers without end", "well", ""])
def test_what_the_work_returns_is_the_answer_and_if_it_breaks_it_says_how(how: str) -> None:
    def work() -> bytes:
        if how == "raises":
            raise OSError("no such device")
        if how == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exits":
            sys.exit(3)
        return b"x" * (ANSWER_BYTES * 3) if how == "answers without end" else how.encode()

    outcome = run_one(work, 5)
    reasons = {"raises": "no such device", "crashes": "without an answer", "exits": ""}
    if how in ("well", ""):
        assert isinstance(outcome, Answered)
        assert outcome.data == how.encode()
    else:
        assert isinstance(outcome, Broke)
        assert reasons.get(how, "bytes") in outcome.reason


def _deaf() -> bytes:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return _sleep()


@pytest.mark.parametrize(("work", "limit_s"), [(_sleep, 0.3), (_deaf, 0.3), (_sleep, 0.0)])
def test_hung_children_hold_up_no_other(work: Callable[[], bytes], limit_s: float) -> None:
    before, began = descendants(os.getpid()), time.monotonic()
    late = {f"hung{number}": (work, limit_s) for number in range(20)}
    outcomes = run_all({**late, "well": (lambda: b"1", 30)})
    assert time.monotonic() - began < 60
    assert all(hung(outcomes[name], limit_s) for name in late)
    assert isinstance(outcomes["well"], Answered)
    assert set(descendants(os.getpid())) <= set(before)


def test_a_hung_child_takes_its_own_children_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def work() -> bytes:
        process = subprocess.Popen(["sleep", str(LONG_S)])
        note.write_text(str(process.pid))
        return bytes(process.wait())

    for limit_s in (0.5, 10.0):  # a busy machine may take long to start one
        assert isinstance(run_one(work, limit_s), Hung)
        if note.exists():
            break
    eventually(lambda: not _lives(note.read_text()), "the end of the child's child")


def test_a_child_holds_neither_our_output_nor_our_files(tmp_path: Path) -> None:
    """slurmd waits until nobody holds the hook's standard output."""
    with (tmp_path / "held").open("w") as held:
        number = held.fileno()

        def work() -> bytes:
            links = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (0, 1, 2)]
            assert set(links) == {os.devnull}
            try:
                os.fstat(number)
            except OSError:
                return b"closed"
            return str(Path(f"/proc/self/fd/{number}").readlink()).encode()

        outcome = run_one(work, 5)
    assert isinstance(outcome, Answered)
    assert b"held" not in outcome.data


def test_children_run_at_the_same_time(tmp_path: Path) -> None:
    def work() -> bytes:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 20:
            time.sleep(0.01)
        return b""

    outcomes = run_all(dict.fromkeys(range(20), (work, 60.0)))
    assert all(isinstance(each, Answered) for each in outcomes.values())


ENDED_AT_ONCE = """
import os, sys, time
from signal import SIGTERM
sys.path[:0] = {path!r}
from slurm_health.system.killable import run_all
def work():
    os.kill(os.getppid(), SIGTERM)
    open({notes!r} + "/" + str(os.getpid()), "w").close()
    time.sleep(3600)
run_all({{number: (work, 3600) for number in range(20)}})
"""


def test_a_child_that_starts_as_the_hook_is_told_to_end_is_ended_too(tmp_path: Path) -> None:
    for attempt in range(3):
        notes = tmp_path / str(attempt)
        notes.mkdir()
        code = ENDED_AT_ONCE.format(path=sys.path, notes=str(notes))
        assert subprocess.run([sys.executable, "-c", code], check=False, timeout=20).returncode == 0
        eventually(partial(_none_lives, notes), "their end")


def _none_lives(notes: Path) -> bool:
    return not any(_lives(pid.name) for pid in notes.iterdir())


def _lives(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_child_whose_parent_was_killed_ends_by_itself(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = f"""
import os, pathlib, signal, time
from slurm_health.system.killable import run_one
def work():
    pathlib.Path({str(note)!r}).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
run_one(work, 1.0)
"""
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, check=False, timeout=20).returncode == -signal.SIGKILL
    eventually(lambda: not _lives(note.read_text()), "the end of the child")


def test_what_is_answered_in_time_counts_however_late_it_is_read() -> None:
    """Whoever waits may be starved as well: then the check has measured, and did not hang."""
    code = """
import os, time
from slurm_health.system.killable import run_one
def held_up():
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    time.sleep(3)
os.register_at_fork(after_in_parent=held_up)
print(run_one(lambda: b"seen", 3))
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Answered(data=b'seen'"), done


@pytest.mark.parametrize(("takes_bytes", "kind"), [(32 << 20, Answered), (256 << 20, Broke)])
def test_a_limit_of_memory_is_of_the_child(takes_bytes: int, kind: type[WorkResult]) -> None:
    def work() -> bytes:
        limit_memory(128 << 20)
        return b"%d" % len(bytearray(takes_bytes))

    with mmap.mmap(-1, 1 << 30):  # as large as the program that runs these tests may be
        assert isinstance(run_one(work, 30), kind)
