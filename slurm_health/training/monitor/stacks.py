# SPDX-License-Identifier: Apache-2.0
"""Where the main threads of ranks are that do not say so themselves: by py-spy, where it may look.

It reads the memory of a process and stops nothing (`--nonblocking`), so a stack may be torn: what
cannot be read is asked for once more.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from slurm_health.records.decoding import from_json
from slurm_health.records.text import cut, one_line
from slurm_health.training.diagnosis.samples import Frame

_STACK_S = 2.0  # of one process
_TRIES = 2
_AT_ONCE = 4
_MOST_FRAMES = 40
_INSTALL = "py-spy is not installed (pip install 'slurm-health[diagnosis]')"


class _Frame(msgspec.Struct):
    filename: str
    name: str
    line: int = 0


class _Thread(msgspec.Struct):
    frames: list[_Frame] = []
    os_thread_id: int | None = None
    thread_name: str | None = None


class Stacks(msgspec.Struct, frozen=True):
    """The stacks of main threads by process, outermost call first; why others have none."""

    by_pid: dict[int, tuple[Frame, ...]] = {}
    why_not: str = ""


def find_py_spy() -> str | None:
    """Return where py-spy is: beside our own interpreter, or among the user's commands."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_stacks(pids: Sequence[int], *, wait_s: float, command: str | None = None) -> Stacks:
    """Return the stacks of processes, as far as they can be read within `wait_s`."""
    program = command or find_py_spy()
    if program is None:
        return Stacks(why_not=_INSTALL)
    until_s = time.monotonic() + wait_s
    stacks: dict[int, tuple[Frame, ...]] = {}
    why_not = ""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reading = {pid: pool.submit(_stack, program, pid, until_s) for pid in pids}
        for pid, stack in reading.items():
            try:
                stacks[pid] = stack.result()
            except (OSError, ValueError) as err:
                why_not = cut(one_line(str(err) or "py-spy did not answer in time"), 200)
    return Stacks(stacks, why_not)


def _stack(command: str, pid: int, until_s: float) -> tuple[Frame, ...]:
    """Return one stack.

    Raises:
        OSError: py-spy cannot be run, or not in time.
        ValueError: py-spy says why it cannot look.
    """
    # Not before a stack is needed: it takes a megabyte.
    from slurm_health.system.processes import run

    argv = [command, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    error = ""
    for _ in range(_TRIES):
        left_s = min(_STACK_S, until_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError
        ended = run(argv, environ=dict(os.environ), deadline_s=left_s)
        if ended.returncode == 0:
            return _main_thread(ended.stdout, pid)
        error = ended.stderr.decode(errors="replace")
        if "permission denied" in error.lower():
            raise ValueError("py-spy may not look: ptrace is not allowed here")
    raise ValueError(f"py-spy: {error}")


def _main_thread(data: bytes, pid: int) -> tuple[Frame, ...]:
    try:
        threads = from_json(data, list[_Thread])
    except msgspec.MsgspecError as err:
        raise ValueError(f"py-spy answered with something else: {err}") from err
    for thread in threads:
        if thread.os_thread_id == pid or thread.thread_name == "MainThread":
            frames = [Frame(f.filename[-300:], f.line, f.name[:100]) for f in thread.frames]
            return tuple(frames[:_MOST_FRAMES][::-1])
    raise ValueError("py-spy saw no main thread")
